"""llama-1b through the trainer, 8 packs of 8,192 tokens a step: tokens per second, MFU, memory.

Documents have lognormal lengths with mean 300 and random tokens. Ways:

    eager              no compilation
    compiled           every block compiled; packs have any number of slots
    compiled, fixed    every pack is padded to the capacity, so that all batches have one shape
    automatic          the trainer's own choices for this device
"""

from __future__ import annotations

from dataclasses import asdict

from gpu_parts.common import at_least, options_of, random_corpus, timed_run, write_part

WAYS = {
    "eager": ["train.compile=false", "train.fixed_shape=false"],
    "compiled": ["train.compile=true", "train.fixed_shape=false"],
    "fixed": ["train.compile=true", "train.fixed_shape=true"],
    "automatic": [],
}
ASKED = {"fixed": 45.0, "automatic": 45.0}
"""Way → MFU that is asked of it on an H100, in percent."""


def main() -> None:
    options = options_of(__doc__, lambda parser: parser.add_argument("--way", choices=WAYS, required=True))
    capacity, packs, steps, skipped = (256, 2, 4, 2) if options.small else (8192, 8, 14, 6)
    vocabulary = 512 if options.small else 128_256
    shape = ["model=tiny"] if options.small else ["model=llama-1b", "train.dtype=bf16"]
    with random_corpus(options, capacity, packs, steps, vocabulary) as (words, _):
        run = timed_run([*words, f"train.steps={steps}", *shape, *WAYS[options.way]], skipped)
    print(asdict(run))
    asked = (
        at_least(f"MFU of llama-1b, {options.way}, %", run.mfu, ASKED[options.way], options)
        if (options.way in ASKED)
        else []
    )
    write_part(
        options, {"way": options.way, "capacity": capacity, "packs_per_step": packs, **asdict(run)}, asked
    )


if __name__ == "__main__":
    main()
