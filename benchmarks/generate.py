"""Tokens a second with the cache of keys and values, and without: the same text by both ways, in turns.

    python benchmarks/generate.py --repeats 5

Greedy, float32, one thread, CPU time of this process; ratios are medians over repetitions in which the two ways take
turns. Both write the same tokens, which is checked. On a GPU (`--device cuda`) the device's own time;
`--dtype bf16` runs under autocast. Results go to results/generate.json.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from functools import partial

import torch

from multipack.models.decoder import Decoder
from multipack.models.generate import generate
from multipack.models.sampling import Sampling
from multipack.shapes import ModelShape
from result import by_turns, device_name, parser_of, write_result

SHAPES = {
    "default": ModelShape(vocabulary_size=2048),
    "12 x 384": ModelShape(layers=12, heads=6, d_model=384, d_ff=1024, vocabulary_size=2048),
}


def measure(model: Decoder, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of both ways, and the median of their ratio; one round is not counted."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 2048, (options.prompt_tokens,), generator=generator).tolist()
    write = partial(generate, model, [prompt], Sampling(options.new_tokens, temperature=0))
    ways = {"cached": partial(write, use_cache=True), "uncached": partial(write, use_cache=False)}
    # bfloat16 rounds by the shape of a product, and near ties fall either way.
    if options.dtype == "fp32" and ways["cached"]() != ways["uncached"]():
        raise AssertionError("the cache changes what is written")
    found = by_turns(ways, options.repeats, options.device)
    ratios = [slow / fast for slow, fast in zip(found["uncached"], found["cached"], strict=True)]
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    return {**medians, "ratio": statistics.median(ratios), "least_ratio": min(ratios)}


def main() -> None:
    parser = parser_of(__doc__, "generate")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: under autocast")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        model = Decoder(shape).to(options.device).eval()
        with torch.autocast(options.device, torch.bfloat16) if options.dtype == "bf16" else nullcontext():
            found = measure(model, options)
        parameters = sum(each.numel() for each in model.parameters())
        rows[name] = {"parameters": parameters, "one_prompt": found}
        rate = options.new_tokens / found["cached"]
        print(
            f"{name:>10}: {rate:>8,.0f} tokens/s with the cache, {found['ratio']:.1f} × those without",
            flush=True,
        )
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    clock = "CPU seconds of the process" if options.device == "cpu" else "CUDA events"
    name = device_name(options.device)
    write_result(options.out, {"rows": rows, **settings, "clock": clock, "device_name": name})


if __name__ == "__main__":
    main()
