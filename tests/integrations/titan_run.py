"""torchtitan's own Trainer and Llama on a CPU, for test_torchtitan.py.

    python titan_run.py FOLDER ACCUMULATION train        two epochs; the same, interrupted and resumed
    python titan_run.py FOLDER ACCUMULATION alone        every document alone, in the steps of FOLDER/steps.json

torchtitan trains on GPUs. What it asks of a device is answered here for the CPU, and FlexAttention, which has no
backward pass there, is computed with all scores under torchtitan's own mask.
"""

import collections
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path += [str(Path(__file__).parents[1] / "distributed"), str(Path(__file__).parents[2] / "examples")]

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "CPU"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
torch.cpu.memory_stats = lambda *_: collections.defaultdict(int)

import torchtitan_train as example  # noqa: E402
from hosts import ROW, Texts  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402
from torchtitan import trainer as host  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

from multipack.integrations.torchtitan import packed  # noqa: E402

host.dist_utils.set_pg_timeouts = lambda **_: None
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def dense(q, k, v, *, block_mask, scale, enable_gqa, **_):
    """FlexAttention with all scores."""
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, types.SimpleNamespace(lse=None, max_scores=None)


FlexAttention.compiled_flex_attn = staticmethod(dense)


def documents_of(inputs):
    """Numbers of the documents of a batch: their first two tokens. Padding is a document of tokens 0."""
    found = []
    for tokens, positions in zip(inputs["input"].tolist(), inputs["positions"].tolist(), strict=True):
        starts = [place for place, position in enumerate(positions) if position == 0]
        found += [
            10 * tokens[start] + tokens[start + 1] for start in starts if any(tokens[start : start + 4])
        ]
    return found


class Recorded(host.Trainer):
    """A Trainer that records the documents of every batch, and stops after step `stop`."""

    stop = sys.maxsize

    def batch_generator(self, data):
        for inputs, labels in super().batch_generator(data):
            self.batches.append(documents_of(inputs))
            yield inputs, labels

    def should_continue_training(self):
        return super().should_continue_training() and self.step < self.stop


def trainer_of(folder, accumulation, steps=1, save_at=0, **loss):
    """A trainer whose weights are the same on every call."""
    config = packed(example.configuration(folder), lambda _: Texts(), seed=1)
    training, checkpoint = config.training, config.checkpoint
    training.seq_len, training.local_batch_size, training.steps = ROW, 2, steps
    training.global_batch_size = 2 * RANKS * accumulation
    training.max_norm, training.disable_cuda_graphs = 1e9, True
    config.parallelism.spmd_backend = "partial_dtensor"  # the other ones need a newer torch than 2.13
    training.mixed_precision_param = "float32"
    config.optimizer = default_adamw(
        lr=0.02, eps=0.1, weight_decay=0.0
    )  # smooth, so that rounding stays small
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 0, 1.0
    for name, value in loss.items():
        setattr(config.loss, name, value)
    checkpoint.enable, checkpoint.interval = bool(save_at), save_at or 1
    trainer = Recorded(config)
    trainer.batches = []
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    generator = torch.Generator().manual_seed(0)
    for name, value in trainer.model_parts[0].named_parameters():
        full = torch.randn(value.shape, generator=generator) * 0.05 + ("norm" in name)
        with torch.no_grad():
            value.copy_(distribute_tensor(full, value.device_mesh, value.placements))
    return trainer


def weights(trainer):
    """All weights, in one flat array."""
    parts = [
        value.full_tensor() if isinstance(value, DTensor) else value
        for value in trainer.model_parts[0].parameters()
    ]
    return torch.cat([part.detach().flatten() for part in parts]).double().numpy()


def train(folder, accumulation):
    """Two epochs, and the same interrupted in the middle of the second one."""
    epoch = len(trainer_of(f"{folder}/first", accumulation).dataloader)
    steps = 2 * epoch // accumulation
    whole = trainer_of(f"{folder}/whole", accumulation, steps)
    whole.train()
    middle = steps * 3 // 4
    cut = trainer_of(folder, accumulation, steps, middle)
    cut.stop = middle
    cut.train()
    resumed = trainer_of(folder, accumulation, steps, middle)
    resumed.train()
    rows = {"whole": whole.batches, "resumed": cut.batches + resumed.batches}
    report = {"epoch": epoch, "cut": cut.dataloader.sampler.epoch, "steps": resumed.step, **rows}
    Path(f"{folder}/rows.{RANK}.json").write_text(json.dumps(report))
    np.save(f"{folder}/whole.{RANK}.npy", weights(whole))
    np.save(f"{folder}/resumed.{RANK}.npy", weights(resumed))


def alone(folder, accumulation):
    """The documents of each step one by one, through the host's own step."""
    trainer = trainer_of(folder, accumulation, num_chunks=1)  # chunks must divide the length
    np.save(f"{folder}/before.npy", weights(trainer))
    for step in json.loads(Path(f"{folder}/steps.json").read_text()):
        rows = [Texts().rows[number] for number in step]
        labels = [torch.tensor([*row["labels"][1:], -100])[None] for row in rows]
        targets = sum((label != -100).sum() for label in labels)
        trainer.optimizers.zero_grad()
        for row, label in zip(rows, labels, strict=True):
            tokens = torch.tensor(row["input_ids"])[None]
            inputs = {"input": tokens, "positions": torch.arange(tokens.shape[1])[None]}
            trainer.forward_backward_step(input_dict=inputs, labels=label, global_valid_tokens=targets)
        trainer.optimizers.step()
    np.save(f"{folder}/alone.npy", weights(trainer))


if __name__ == "__main__":
    {"train": train, "alone": alone}[sys.argv[3]](sys.argv[1], int(sys.argv[2]))
