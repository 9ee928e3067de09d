"""TRL's SFTTrainer on packs, with a LoRA adapter; only completions are learned.

python examples/trl_sft.py
torchrun --nproc-per-node 2 examples/trl_sft.py
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from multipack.integrations.trl import PackedSFTTrainer


def documents(count=120):
    """Sums of very different lengths, as TRL takes them: a prompt and its completion."""
    for number in range(count):
        terms = [(number * term) % 97 for term in range(1, 2 + number % 23)]
        yield {"prompt": " + ".join(map(str, terms)), "completion": f" = {sum(terms)}"}


def character_tokenizer():
    """A token per character."""
    words = {character: number for number, character in enumerate(["<pad>", "<eos>", *"0123456789+= "])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def main(folder):
    """Train for two epochs; `folder` gets the checkpoints."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = PackedSFTTrainer(
        LlamaForCausalLM(config),
        SFTConfig(
            folder,
            max_length=256,  # tokens of a pack, too
            num_train_epochs=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=5,
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Dataset.from_list(list(documents())),
        processing_class=character_tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["packed-sft"])
