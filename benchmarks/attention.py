"""Attention on the CPU, three ways, over the same documents: per-document loop, padded batch, dense mask.

    python benchmarks/attention.py --repeats 5

One thread, CPU time of this process (a busy machine slows all three alike), the three alternated in one run;
the ratios are medians over repetitions. Documents are lognormal, scaled to fill the pack, and drawn until
padding to the longest would take about `--pad-factor` times their tokens. Results go to
results/attention.json beside this script.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models.attention import attention
from result import write_result

RESULTS = Path(__file__).parent / "results" / "attention.json"
WAYS = ("loop", "padded", "dense")
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw_lengths(tokens: int, documents: int, pad_factor: float, seed: int) -> list[int]:
    """Lognormal lengths that sum to `tokens` and whose longest is about pad_factor × their mean."""
    generator = np.random.default_rng(seed)
    for _ in range(100_000):
        weights = generator.lognormal(0.0, 0.7, documents)
        lengths = np.maximum(1, np.floor(weights / weights.sum() * tokens)).astype(np.int64)
        lengths[lengths.argmax()] += tokens - lengths.sum()
        if abs(lengths.max() * documents / tokens / pad_factor - 1) < 0.01:
            return lengths.tolist()
    raise ValueError(f"no draw of {documents} documents has a pad factor of {pad_factor}: ask for another")


def make_batch(lengths: list[int]) -> PackedBatch:
    """A pack of documents of these lengths; what they say does not matter here."""
    none = np.zeros((0, 2), dtype=np.int64)
    documents = [Document(np.zeros(length, dtype=np.uint16), none) for length in lengths]
    return PackedCollator(len(lengths), max(lengths))(documents)


def padded_slots(lengths: tuple[int, ...]) -> Tensor:
    """(T,) the slot of each token when every document is a row as wide as the longest."""
    return torch.cat([row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)])


def pad(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(T, H, D) → (rows × width, H, D), zeros where there is no token."""
    padded = x.new_zeros(len(lengths) * max(lengths), *x.shape[1:])
    return padded.index_copy(0, padded_slots(lengths), x)


def make_ways(batch: PackedBatch) -> dict[str, Way]:
    """The three functions (q, k, v) → (T, H, D)."""

    def attend_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # As a padded model does: its rows are padded from the first layer on, so padding is not timed here.
        shape = (len(batch.lengths), max(batch.lengths), *q.shape[1:])
        q, k, v = (x.view(shape).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return {
        "loop": lambda q, k, v: attention(q, k, v, batch, "loop"),
        "padded": attend_padded,
        "dense": lambda q, k, v: attention(q, k, v, batch, "dense"),
    }


def measure(
    ways: dict[str, Way], inputs: dict[str, list[Tensor]], repeats: int, backward: bool
) -> dict[str, list[float]]:
    """CPU seconds of each way and repetition, alternating."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    upstream = {name: torch.ones_like(tensors[0]) for name, tensors in inputs.items()}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.process_time()
            with torch.set_grad_enabled(backward):
                out = way(*inputs[name])
            if backward:
                torch.autograd.grad(out, inputs[name], upstream[name])
            seconds[name].append(time.process_time() - start)
    return seconds


def largest_difference(ways: dict[str, Way], inputs: dict[str, list[Tensor]], slots: Tensor) -> float:
    """Largest absolute difference between the loop's result and the others', over real tokens."""
    with torch.no_grad():
        expected = ways["loop"](*inputs["loop"])
        padded = ways["padded"](*inputs["padded"])[slots]
        dense = ways["dense"](*inputs["dense"])
    return max(float((expected - other).abs().max()) for other in (padded, dense))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="T, tokens in the pack")
    parser.add_argument("--documents", type=int, default=22, help="documents in the pack")
    parser.add_argument("--pad-factor", type=float, default=3.0, help="longest over mean length")
    parser.add_argument("--heads", type=int, default=8, help="H")
    parser.add_argument("--head-width", type=int, default=64, help="D")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    lengths = draw_lengths(options.tokens, options.documents, options.pad_factor, options.seed)
    batch = make_batch(lengths)
    ways = make_ways(batch)
    size = (options.tokens, options.heads, options.head_width)
    packed = [torch.randn(size).to(getattr(torch, options.dtype)).requires_grad_() for _ in range(3)]
    padded = [pad(x.detach(), batch.lengths).requires_grad_() for x in packed]
    inputs = {"loop": packed, "padded": padded, "dense": packed}

    result = {
        "tokens": options.tokens,
        "documents": len(lengths),
        "longest": max(lengths),
        "mean": options.tokens / len(lengths),
        "pad_factor": max(lengths) * len(lengths) / options.tokens,
        "sum_of_squares_over_square": sum(length**2 for length in lengths) / options.tokens**2,
        "heads": options.heads,
        "head_width": options.head_width,
        "dtype": options.dtype,
        "threads": options.threads,
        "repeats": options.repeats,
        "seed": options.seed,
        "largest_difference": largest_difference(ways, inputs, padded_slots(batch.lengths)),
        "clock": "CPU seconds of the process",
    }
    for title, backward in (("forward", False), ("forward_backward", True)):
        measure(ways, inputs, 1, backward)
        seconds = measure(ways, inputs, options.repeats, backward)
        result[title] = {
            name: {
                "median_seconds": statistics.median(times),
                "ratio_to_loop": statistics.median(
                    time / loop for time, loop in zip(times, seconds["loop"], strict=True)
                ),
            }
            for name, times in seconds.items()
        }
    print_table(result)
    write_result(options.out, result)


def print_table(result: dict) -> None:
    print(
        f"{result['tokens']:,} tokens, {result['documents']} documents, longest {result['longest']:,},"
        f" mean {result['mean']:.0f}, pad factor {result['pad_factor']:.2f};"
        f" H={result['heads']}, D={result['head_width']}, {result['dtype']}, {result['threads']} thread(s)"
    )
    print(f"{'':8}{'forward':>22}{'forward + backward':>26}")
    for name in WAYS:
        forward, both = result["forward"][name], result["forward_backward"][name]
        print(
            f"{name:8}{forward['median_seconds'] * 1e3:>12,.0f} ms {forward['ratio_to_loop']:>5.2f} ×"
            f"{both['median_seconds'] * 1e3:>16,.0f} ms {both['ratio_to_loop']:>5.2f} ×"
        )
    print(f"largest difference over real tokens: {result['largest_difference']:.1e}")


if __name__ == "__main__":
    main()
