"""Attention over the same documents, every way that the device has: the table's rows, padded rows, a dense mask.

    python benchmarks/attention.py                                     # CPU, float32, one thread
    python benchmarks/attention.py --device cuda --dtype bfloat16 --tokens 32768 --documents 88 --heads 32 --kv-heads 8

Everything alternates in one run, and the ratios are medians over repetitions: to the row that `auto` chooses. On a
CPU the clock is this process's CPU time; on a GPU it is the device's own.
Documents are lognormal, scaled to fill the pack, and drawn until padding to the longest would take about
`--pad-factor` times their tokens. `padded` is what a padded model does: its rows are padded from the first layer on,
so that spreading the tokens over them is not timed. Results go to results/attention.json beside this script, those
of a GPU to results/attention_cuda.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from multipack.data.packs.collate import PackedCollator, pad_documents
from multipack.data.views.documents import Document
from multipack.ops.attention import attention, select
from multipack.ops.attention.table import BACKENDS, Request
from result import RESULTS, by_turns, device_name, median_ratio, parser_of, write_result

OPTIONS: dict[str, tuple[int, str]] = {
    "tokens": (8192, "T, tokens in the pack"),
    "documents": (22, "documents in the pack"),
    "heads": (8, "H"),
    "kv-heads": (0, "K; 0 = H"),
    "head-width": (64, "D"),
    "repeats": (5, "timed repetitions, after those that are not"),
    "threads": (1, "threads of torch"),
}


@dataclass(frozen=True)
class Way:
    """Something to time: what it runs on, and how."""

    name: str
    inputs: list[Tensor]
    run: Callable[..., Tensor]


def draw_lengths(tokens: int, documents: int, pad_factor: float) -> list[int]:
    """Lognormal lengths that sum to `tokens` and whose longest is about pad_factor × their mean."""
    generator = np.random.default_rng(0)
    for _ in range(100_000):
        weights = generator.lognormal(0.0, 0.7, documents)
        lengths = np.maximum(1, np.floor(weights / weights.sum() * tokens)).astype(np.int64)
        lengths[lengths.argmax()] += tokens - lengths.sum()
        if abs(lengths.max() * documents / tokens / pad_factor - 1) < 0.01:
            return lengths.tolist()
    raise ValueError(f"no draw of {documents} documents has a pad factor of {pad_factor}: ask for another")


def padded_slots(lengths: list[int]) -> Tensor:
    """(T,) the slot of each token when every document is a row as wide as the longest."""
    return torch.cat([row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)])


def make_ways(inputs: list[Tensor], lengths: list[int], without: list[str]) -> list[Way]:
    """Every row of the table that takes these inputs, and padded rows; the one that `auto` chooses comes first."""
    q = inputs[0]
    none = np.zeros((0, 2), dtype=np.int64)
    documents = [Document(np.zeros(length, dtype=np.uint16), none) for length in lengths]
    packed = PackedCollator(len(lengths), max(lengths))(documents).to(q.device)
    padded = pad_documents(documents).to(q.device)
    request = Request(q.device, q.dtype, q.shape[2])
    names = [
        row.name for row in BACKENDS if not row.obstacle(request) and row.name not in ["padded", *without]
    ]
    first = select("auto", q).name
    ways = [
        Way(name, inputs, partial(attention, batch=packed, backend=name))
        for name in sorted(names, key=lambda name: name != first)
    ]
    slots = padded_slots(lengths).to(q.device)
    size = padded.num_slots
    rows = [x.new_zeros(size, *x.shape[1:]).index_copy(0, slots, x.detach()).requires_grad_() for x in inputs]
    return [*ways, Way("padded", rows, partial(attention, batch=padded, backend="loop"))]


def call(way: Way, backward: bool) -> None:
    """One call, and its way back."""
    with torch.set_grad_enabled(backward):
        out = way.run(*way.inputs)
    if backward:
        torch.autograd.grad(out, way.inputs, out)


def measure(ways: list[Way], repeats: int, backward: bool) -> dict[str, dict[str, float]]:
    """Median seconds of each way, and its ratio to the first, over repetitions in which they alternate."""
    device, first = str(ways[0].inputs[0].device), ways[0].name
    calls = {way.name: partial(call, way, backward) for way in ways}
    found = by_turns(calls, repeats, device, unmeasured=3 if device.startswith("cuda") else 1)
    return {
        name: {
            "median_seconds": statistics.median(seconds),
            f"ratio_to_{first}": median_ratio(seconds, found[first]),
        }
        for name, seconds in found.items()
    }


def largest_difference(ways: list[Way], slots: Tensor) -> dict[str, float]:
    """Largest absolute difference between the loop's result and the others', over real tokens."""
    with torch.no_grad():
        results = {way.name: way.run(*way.inputs) for way in ways}
    results["padded"] = results["padded"][slots.to(results["padded"].device)]
    expected = results["loop"].float()
    return {name: float((expected - result.float()).abs().max()) for name, result in results.items()}


def main() -> None:
    parser = parser_of(__doc__, "attention")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    for name, (default, meaning) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--pad-factor", type=float, default=3.0, help="longest over mean length")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--without", nargs="*", default=[], help="ways to leave out (dense, at many tokens)")
    parser.set_defaults(out=None)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    lengths = draw_lengths(options.tokens, options.documents, options.pad_factor)
    counts = (options.heads, *[options.kv_heads or options.heads] * 2)
    dtype = getattr(torch, options.dtype)
    inputs = [
        torch.randn(options.tokens, count, options.head_width).to(device, dtype).requires_grad_()
        for count in counts
    ]
    ways = make_ways(inputs, lengths, options.without)
    on_gpu = device.type == "cuda"
    result = {
        "device": device_name(options.device),
        **{name: value for name, value in vars(options).items() if name not in ("device", "without", "out")},
        "longest": max(lengths),
        "mean": options.tokens / len(lengths),
        "pad_factor": max(lengths) * len(lengths) / options.tokens,
        "kv_heads": counts[1],
        "largest_difference": largest_difference(ways, padded_slots(lengths)),
        "clock": "CUDA events" if on_gpu else "CPU seconds of the process",
        "forward": measure(ways, options.repeats, False),
        "forward_backward": measure(ways, options.repeats, True),
    }
    print_table(result)
    write_result(options.out or RESULTS / f"attention{'_cuda' if on_gpu else ''}.json", result)


def print_table(result: dict) -> None:
    print(
        f"{result['device']}: {result['tokens']:,} tokens, {result['documents']} documents,"
        f" longest {result['longest']:,}, mean {result['mean']:.0f}, pad factor {result['pad_factor']:.2f};"
        f" H={result['heads']}, K={result['kv_heads']}, D={result['head_width']},"
        f" {result['dtype']}, {result['threads']} thread(s)"
    )
    print(f"{'':10}{'forward':>24}{'forward + backward':>28}{'difference':>14}")
    for name, both in result["forward_backward"].items():
        times = [tuple(way.values()) for way in (result["forward"][name], both)]
        cells = [f"{seconds * 1e3:>14,.2f} ms {ratio:>6.2f} ×" for seconds, ratio in times]
        print(f"{name:10}{cells[0]}{cells[1]:>28}{result['largest_difference'][name]:>14.1e}")


if __name__ == "__main__":
    main()
