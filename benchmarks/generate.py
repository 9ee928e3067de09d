"""Tokens a second with the cache of keys and values, and without: the same text by both ways, in turns.

    python benchmarks/generate.py --repeats 5

Greedy, float32, one thread, CPU time of this process (a busy machine slows both alike); ratios are medians over
repetitions in which the two ways take turns. Both write the same tokens, which is checked. A second table completes
several prompts of unequal lengths, by a quarter of the tokens: together (read as one pack, written side by side) and
one after the other. On a GPU (`--device cuda`) wall time after synchronizing; `--dtype bf16` runs under autocast.
Results go to results/generate.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from multipack.models.decoder import Decoder
from multipack.models.generate import generate, generate_batch
from multipack.models.sampling import Sampling
from multipack.shapes import ModelShape
from result import parser_of, write_result

SHAPES = {
    "default": ModelShape(vocabulary_size=2048),
    "12 x 384": ModelShape(layers=12, heads=6, d_model=384, d_ff=1024, vocabulary_size=2048),
}


def seconds(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """CPU seconds of the process; on a GPU, wall seconds until the device is done."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    made = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began, made


def prompt_of(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return torch.randint(0, 2048, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def in_turns(ways: dict[str, Callable[[], Any]], repeats: int, device: str, same: bool) -> dict[str, Any]:
    """Median seconds of two ways, and the median of the second's over the first's; one round is not counted."""
    rounds = []
    for _ in range(repeats + 1):
        round_ = {name: seconds(work, device) for name, work in ways.items()}
        texts = [made for _, made in round_.values()]
        if same and texts[0] != texts[1]:
            raise AssertionError(f"{' and '.join(ways)} write different tokens")
        rounds.append({name: spent for name, (spent, _) in round_.items()})
    fast, slow = ways
    return {
        **{name: statistics.median(each[name] for each in rounds[1:]) for name in ways},
        "ratio": statistics.median(each[slow] / each[fast] for each in rounds[1:]),
        "least_ratio": min(each[slow] / each[fast] for each in rounds[1:]),
    }


def main() -> None:
    parser = parser_of(__doc__, "generate")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=8, help="of the second table")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: under autocast")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    half = options.dtype == "bf16"
    rows = {}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        model = Decoder(shape).to(options.device).eval()
        autocast = torch.autocast(options.device, torch.bfloat16) if half else nullcontext()
        with autocast:
            rows[name] = measure(model, options)
        alone, several = rows[name]["one_prompt"], rows[name]["several_prompts"]
        print(
            f"{name:>10}: {options.new_tokens / alone['cached']:>8,.0f} tokens/s with the cache,"
            f" {alone['ratio']:.1f} × those without; {options.prompts} prompts together"
            f" {several['ratio']:.1f} × one after the other",
            flush=True,
        )
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    clock = "CPU seconds of the process" if options.device == "cpu" else "wall seconds"
    device = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    write_result(options.out, {"rows": rows, **settings, "clock": clock, "device_name": device})


def measure(model: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    """Both tables of one model."""
    prompt, most = prompt_of(options.prompt_tokens, 0), options.new_tokens
    exact = (
        options.dtype == "fp32"
    )  # bfloat16 rounds by the shape of a product, and near ties fall either way
    common = (options.repeats, options.device, exact)
    ways: dict[str, Callable[[], Any]] = {
        "cached": lambda: generate(model, prompt, most, temperature=0),
        "uncached": lambda: generate(model, prompt, most, temperature=0, use_cache=False),
    }
    one = in_turns(ways, *common)
    prompts = [prompt_of(16 * (number + 1), number) for number in range(options.prompts)]
    new = most // 4
    greedy = Sampling(max_tokens=new, temperature=0)
    ways = {
        "together": lambda: [each.tokens for each in generate_batch(model, prompts, greedy)],
        "apart": lambda: [generate(model, each, new, temperature=0) for each in prompts],
    }
    several = in_turns(ways, *common)
    return {"parameters": model.parameter_count(), "one_prompt": one, "several_prompts": several}


if __name__ == "__main__":
    main()
