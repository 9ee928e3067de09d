"""torchtitan's Trainer on packs of documents, in place of rows that cut them.

torchrun --nproc-per-node 2 examples/torchtitan_train.py          # GPUs
"""

import os
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from multipack.integrations.torchtitan import packed


def documents(tokenizer, count=120):
    """A data set of token lists: sums of very different lengths."""
    texts = (" + ".join(map(str, range(1, 2 + number % 23))) for number in range(count))
    return [{"input_ids": tokenizer.encode(text)} for text in texts]


def configuration(folder, steps=20):
    """The debug model of torchtitan on packs; `folder` gets the tokenizer and checkpoints."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    Path(folder).mkdir(exist_ok=True)
    tokenizer.save(f"{folder}/tokenizer.json")

    config = llama3_debugmodel()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.training.seq_len = 256  # tokens of a pack
    config.training.local_batch_size = 2  # packs of a batch
    config.training.steps = steps
    config.checkpoint.enable = True
    config.checkpoint.interval = steps // 2
    return packed(config, documents, seed=1)


def main(folder):
    """Train, or continue from the last checkpoint in `folder`."""
    trainer = configuration(folder).build()
    try:
        trainer.train()
    finally:
        trainer.close()


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(*sys.argv[1:] or ["packed-torchtitan"])
