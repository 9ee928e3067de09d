"""A loop of Accelerate on packs, which continues in the middle of an epoch.

python examples/accelerate_loop.py
accelerate launch --num_processes 2 examples/accelerate_loop.py
"""

from contextlib import nullcontext
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torchdata.stateful_dataloader import StatefulDataLoader

from multipack import PackedBatchSampler
from multipack.integrations.collator import PackedDataCollator, document_lengths


def train(model, data, capacity, accumulation=1, epochs=2, rate=0.1, stop=None, saved=None, cpu=False):
    """Train for `epochs`, or until step `stop`; the state that `saved` continues from."""
    accelerator = Accelerator(cpu=cpu)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    packs = {"capacity": capacity, "packs_per_step": ranks * accumulation, "rank": rank, "world_size": ranks}
    sampler = PackedBatchSampler(document_lengths(data), **packs)
    loader = StatefulDataLoader(data, batch_sampler=sampler, collate_fn=PackedDataCollator())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    saved = saved or {"epoch": 0, "step": 0}
    step = saved["step"]
    if step:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    parallel, optimizer = accelerator.prepare(model, optimizer)  # not the loader: its packs are this rank's
    for epoch in range(saved["epoch"], epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        while group := list(islice(batches, accumulation)):
            group = [send_to_device(batch, accelerator.device) for batch in group]
            targets = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in group))
            for number, batch in enumerate(group, 1):
                with nullcontext() if number == len(group) else accelerator.no_sync(parallel):
                    loss = parallel(**batch, num_items_in_batch=targets).loss
                    accelerator.backward(loss * ranks)  # DDP averages the gradients of ranks
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == stop:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                return state | {"epoch": epoch, "step": step, "loader": loader.state_dict()}
    return None


if __name__ == "__main__":
    from transformers_trainer import documents, tiny

    train(tiny(), list(documents()), capacity=512)
