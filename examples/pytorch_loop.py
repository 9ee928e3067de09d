"""A plain PyTorch loop on packs with torchdata's StatefulDataLoader, which continues in the middle of an epoch.

python examples/pytorch_loop.py
torchrun --nproc-per-node 2 examples/pytorch_loop.py
"""

from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from multipack import PackedBatchSampler
from multipack.integrations.collator import PackedDataCollator, document_lengths


def train(model, data, capacity, accumulation=1, epochs=2, rate=0.1, workers=0, stop=None, saved=None):
    """Train for `epochs`, or until step `stop`; the state that `saved` continues from."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    packs = {"capacity": capacity, "packs_per_step": ranks * accumulation, "rank": rank, "world_size": ranks}
    sampler = PackedBatchSampler(document_lengths(data), **packs)
    loader = StatefulDataLoader(
        data, batch_sampler=sampler, collate_fn=PackedDataCollator(), num_workers=workers
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    saved = saved or {"epoch": 0, "step": 0}
    step = saved["step"]
    if step:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    for epoch in range(saved["epoch"], epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        while group := list(islice(batches, accumulation)):
            targets = sum((batch["labels"] != -100).sum() for batch in group)
            if ranks > 1:
                dist.all_reduce(targets)
            for number, batch in enumerate(group, 1):
                with nullcontext() if number == len(group) or ranks == 1 else parallel.no_sync():
                    loss = parallel(**batch, num_items_in_batch=targets).loss
                    (loss * ranks).backward()  # DDP averages the gradients of ranks
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == stop:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                return state | {"epoch": epoch, "step": step, "loader": loader.state_dict()}
    return None


if __name__ == "__main__":
    from transformers_trainer import documents, tiny

    if dist.is_torchelastic_launched():
        dist.init_process_group()
    train(tiny(), list(documents()), capacity=512)
