"""transformers' Trainer on packs of documents, in place of padded rows.

python examples/transformers_trainer.py
torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import sys

from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from multipack.integrations.transformers import PackedTrainer


def documents(count=120):
    """Sums in words, of very different lengths, as bytes; any data set with a column input_ids will do."""
    for number in range(count):
        terms = [str((number * term) % 97) for term in range(1, 2 + number % 23)]
        text = f"{' + '.join(terms)} = {sum(map(int, terms))}"
        yield {"input_ids": list(text.encode())}


def tiny():
    """A Llama of bytes with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


def main(folder):
    """Train for two epochs; `folder` gets the checkpoints."""
    data = list(documents())
    trainer = PackedTrainer(
        tiny(),
        TrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=2,  # packs of a row: 2 · 256 tokens
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=5,
            eval_strategy="epoch",
            report_to="none",
        ),
        train_dataset=data[20:],
        eval_dataset=data[:20],
        capacity=256,  # tokens of a pack
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["packed-llama"])
