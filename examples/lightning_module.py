"""Lightning on packs, with torchdata's StatefulDataLoader, which continues in the middle of an epoch.

python examples/lightning_module.py
"""

import lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from multipack import PackedBatchSampler
from multipack.integrations.collator import PackedDataCollator, document_lengths


class Packed(lightning.LightningModule):
    """A causal language model of transformers, trained on packs of `capacity` tokens."""

    def __init__(self, model, data, capacity, rate=0.1):
        super().__init__()
        self.model, self.data, self.capacity, self.rate = model, data, capacity, rate

    def train_dataloader(self):
        """This rank's packs; the sampler plans how many targets each step has."""
        ranks, self.accumulation = self.trainer.world_size, self.trainer.accumulate_grad_batches
        self.sampler = PackedBatchSampler(
            document_lengths(self.data),
            targets=[
                sum(label != -100 for label in row.get("labels", row["input_ids"])[1:]) for row in self.data
            ],
            capacity=self.capacity,
            packs_per_step=ranks * self.accumulation,
            rank=self.trainer.global_rank,
            world_size=ranks,
        )
        return StatefulDataLoader(self.data, batch_sampler=self.sampler, collate_fn=PackedDataCollator())

    def training_step(self, batch, number):
        """The share of this micro-batch in the mean over the targets of the step."""
        targets = self.sampler.plan.denominator(number // self.accumulation)
        loss = self.model(**batch, num_items_in_batch=targets).loss
        return loss * self.trainer.world_size * self.accumulation  # Lightning divides by both

    def configure_optimizers(self):
        """Plain SGD."""
        return torch.optim.SGD(self.model.parameters(), lr=self.rate)


if __name__ == "__main__":
    from transformers_trainer import documents, tiny

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, use_distributed_sampler=False
    )
    trainer.fit(Packed(tiny(), list(documents()), capacity=512))
