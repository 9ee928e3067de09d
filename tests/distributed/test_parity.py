"""The parity matrix: every strategy, and their combinations, against one process: losses, norms, weights.

Four packs of unequal target counts make a global step, or as many as there are ranks.
"""

import functools
import tempfile
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import sharding as tiny
import torch

from multipack.parallel.build import build_engine
from multipack.parallel.mesh import Mesh, build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.world import World
from multipack.shapes.adapter import AdapterConfig
from multipack.training.optimizer import build_optimizer, meta_parameters
from multipack.training.settings import OptimizerConfig

SLOTS = 64
SHAPES = {
    "gpt": replace(tiny.GPT, vocabulary_size=64),
    "llama": replace(tiny.LLAMA, heads=8, kv_heads=4, context=64, vocabulary_size=64),
}
# Ranks divide rows of 128 numbers without a cut in blocks of 64.
SHAPES["wide"] = replace(SHAPES["llama"], d_model=64, head_dim=16, d_ff=128)
SHAPES["families"] = tiny.with_switches(SHAPES["llama"])
# All matrices have one shape: for each, torch's first step with Muon on tensor ranks compares placements for seconds.
SHAPES["square"] = replace(SHAPES["llama"], kv_heads=8, d_ff=32)
ADAPTERS = {
    "lora": AdapterConfig(
        "lora", rank=4, targets=["attention", "down_proj"], rank_stabilized=True, train=["norm"]
    ),
    "dora": AdapterConfig("dora", rank=4, alpha=4.0),
    "qlora": AdapterConfig("lora", rank=4, targets=["attention"], quantize="nf4"),
    "int8": AdapterConfig("dora", rank=4, quantize="int8"),
    "qdora": AdapterConfig(
        "dora", rank=4, quantize="nf4", double_quantize=False, train=["blocks.0.feed_forward"]
    ),
}
ADAPTERS["qdora"].targets = ["attention", "blocks.1.feed_forward"]


def packs_of(step, count, kind="random"):
    """Packs of documents that fill 40 … 64 slots; of alike ones, which share what they have in common, or do not."""
    draw, packs = np.random.default_rng(step), []
    if kind != "random":
        return [tiny.alike([step, number], 64, SLOTS, kind == "shared") for number in range(count)]
    for number in range(count):
        lengths, left = [], int(draw.integers(40, SLOTS + 1))
        while left > 2:
            lengths.append(int(min(left, draw.integers(2, 40))))
            left -= lengths[-1]
        packs.append(tiny.packed(lengths, [step, number], 64, SLOTS))
    return packs


def optimizer_of(kind, blueprint, parameters):
    if kind == "sgd":
        return torch.optim.SGD(list(parameters.values()), lr=0.1)
    # With Adam's usual 1e-8, gradients that are rounding alone, of about 1e-8, become whole steps.
    config = OptimizerConfig(name=kind, lr=1e-3, eps=1e-5)
    return build_optimizer(parameters, config, meta_parameters(blueprint.shapes, blueprint.saved))


def run(mesh, config, shape, optimizer, steps, count, adapter="", kind="random"):
    """Losses and norms of `count` packs a step, and the weights after them; on every rank the same."""
    adapter, _, dequantized = adapter.partition(" ")
    blueprint = tiny.blueprint(shape, adapter=ADAPTERS.get(adapter), dequantized=bool(dequantized))
    engine = build_engine(
        blueprint,
        functools.partial(optimizer_of, optimizer, blueprint),
        mesh,
        config,
        micro_batches=count // mesh.data_size,
    )
    losses, norms = [], []
    for step in range(steps):
        packs = packs_of(step, count, kind)
        targets = sum(pack.num_target_tokens for pack in packs)
        own = packs[mesh.data_rank :: mesh.data_size]
        result = engine.forward_backward(own, targets)
        losses.append(mesh.world.sum([sum(result.losses)])[0] / targets)
        norms.append(engine.clip(0.5))
        engine.step(0.1 if optimizer == "sgd" else 1e-3)
    own = packs_of(99, count, kind)[mesh.data_rank :: mesh.data_size]
    validation = mesh.world.sum([sum(engine.evaluate(own))])[0]
    weights = {
        key: value.float().cpu().numpy()
        for key, value in tiny.whole_parameters(engine).items()
        if blueprint.saved is None or key in blueprint.saved
    }
    return losses, norms, validation, weights


class Case(NamedTuple):
    """What ranks train.

    Attributes:
        ranks: number of processes.
        strategy: as `fields_of` reads it.
        name: key of `SHAPES`.
        optimizer: see `optimizer_of`.
        steps: number of steps.
        adapter: key of `ADAPTERS`.
        shares: documents share their beginnings; those of one process do not.
    """

    ranks: int
    strategy: str
    name: str = "llama"
    optimizer: str = "adamw"
    steps: int = 2
    adapter: str = ""
    shares: bool = False

    def __str__(self):
        more = [self.adapter] * bool(self.adapter) + ["shared"] * self.shares
        return "-".join([f"{self.ranks} ranks", self.strategy, self.name, self.optimizer, *more])


def fields_of(strategy):
    """Fields of `ParallelConfig` for a text as "zero3 ulysses=2 tensor=2" or "pipeline=2 gpipe"."""
    fields = {}
    for word in strategy.split():
        name, _, value = word.partition("=")
        if name in ("ulysses", "planned"):
            fields |= {"context": int(value), "context_method": name}
        elif name in ("gpipe", "interleaved"):
            fields["schedule"] = name
        elif value:
            fields[name] = value if name == "offload" else float(value) if "." in value else int(value)
        else:
            fields["data"] = name
    return fields


def trained(world, fields, *arguments):
    folder = {"offload_folder": tempfile.gettempdir()} if fields.get("offload") == "disk" else {}
    config = ParallelConfig(**fields, **folder).resolved(arguments[0], arguments[-1] == "shared")
    config.check(arguments[0], world.size, SLOTS)
    found = run(build_mesh(config, world), config, *arguments)
    return found if world.rank in (0, world.size - 1) else None


@functools.cache
def alone(*arguments):
    """The reference: one process."""
    return run(Mesh(World()), ParallelConfig(), *arguments)


def of(ranks, strategies, *more, **named):
    """Cases of strategies that commas part."""
    return [Case(ranks, strategy.strip(), *more, **named) for strategy in strategies.split(",")]


MATRIX = {
    2: "ddp, zero1, zero2, zero3, zero3 offload=cpu, tensor=2, ulysses=2, planned=2,"
    " pipeline=2 gpipe, pipeline=2, pipeline=2 interleaved",
    4: "ddp, zero1, zero2, zero3, hsdp, hsdp replicate=4, tensor=4, ulysses=4, planned=4, pipeline=4, pipeline=4 gpipe,"
    " zero3 offload=cpu tensor=2, tensor=2, ulysses=2, pipeline=2,"
    " zero1 tensor=2, zero2 tensor=2, zero3 tensor=2,"
    " zero1 planned=2, zero3 ulysses=2,"
    " zero1 pipeline=2, zero2 pipeline=2 gpipe, zero3 pipeline=2 interleaved,"
    " tensor=2 pipeline=2, tensor=2 pipeline=2 interleaved,"
    " planned=2 tensor=2, ulysses=2 tensor=2, ulysses=2 pipeline=2, zero3 planned=2 tensor=2",
    8: "tensor=2 pipeline=2, zero1 tensor=2 pipeline=2, zero3 tensor=2 pipeline=2 interleaved,"
    " zero2 offload=cpu tensor=2 pipeline=2, tensor=2 pipeline=4, zero1 pipeline=4,"
    " zero1 ulysses=2 tensor=2, zero2 ulysses=2 tensor=2, planned=4 tensor=2, planned=8,"
    " hsdp tensor=2, hsdp replicate=4 tensor=2, hsdp pipeline=2, hsdp ulysses=2, hsdp ulysses=2 tensor=2,"
    " zero3 planned=2 pipeline=2, zero2 planned=2 pipeline=2 interleaved,"
    " ulysses=2 tensor=2 pipeline=2, planned=2 tensor=2 pipeline=2 gpipe",
}
"""Number of ranks → strategies."""
FAST = [
    *of(2, MATRIX[2]),
    *of(2, "zero3", optimizer="muon", steps=1),
    *of(2, "zero3 offload=disk", optimizer="adamw_8bit", steps=3),
    *of(2, "ddp", "gpt", adapter="lora"),
    *of(4, "ulysses=2 pipeline=2", "families", "sgd", 1),
    *of(4, "context=2 tensor=2", "llama", "sgd", 1, shares=True),
    *of(4, "zero3 tensor=2", "wide", "sgd", adapter="qdora"),
]
ADAPTED = {
    2: "tensor=2, ulysses=2, pipeline=2, pipeline=2 interleaved, zero1, zero2, zero3, zero3 offload=cpu",
    4: "hsdp, tensor=4, zero1 tensor=2, zero3 tensor=2, zero3 pipeline=2 interleaved, tensor=2 pipeline=2 interleaved,"
    " ulysses=2 pipeline=2",
}
QUANTIZED = "zero3 pipeline=2 interleaved, tensor=2 pipeline=2 interleaved, ulysses=2 pipeline=2"
SLOW = [
    # Optimizers do not know models: each strategy has both models and both optimizers, crossed in one way.
    *(case for ranks in MATRIX for case in of(ranks, MATRIX[ranks], "gpt", "adamw", 3)),
    *(case for ranks in MATRIX for case in of(ranks, MATRIX[ranks], "llama", "sgd", 3)),
    *of(
        2, "offload=disk, zero1 offload=disk, zero2 offload=disk, zero3 offload=disk, pipeline=2 offload=disk"
    ),
    *of(4, "hsdp tensor=2 offload=disk"),
    *of(2, "tensor=2", "square", "muon", 1),
    *of(2, "ddp, zero1, zero2, tensor=2, ulysses=2, pipeline=2", "llama", "muon", 1),
    *of(4, "zero3 tensor=2, zero1 pipeline=2, hsdp", "llama", "muon", 1),
    *of(2, "zero1, zero2, zero3 offload=cpu", "llama", "adamw_8bit", 3),
    *of(4, "hsdp pipeline=2", "llama", "adamw_8bit", 3),
    *of(2, "zero1", "llama", "adamw_bf16", 3),
    *of(4, "zero3 tensor=2", "llama", "adamw_bf16", 3),
    *of(4, "zero3, hsdp, tensor=4, ulysses=4, zero3 offload=cpu tensor=2", "families", "sgd", 1),
    *of(4, "zero3 pipeline=2 interleaved", "families", "sgd", 1),
    *(case for case in of(2, MATRIX[2], "gpt", "sgd", 1, shares=True) if "planned" not in case.strategy),
    *of(2, "zero3", "llama", "sgd", 1, shares=True),
    *of(4, "zero1 pipeline=2", "gpt", "sgd", 1, shares=True),
    *of(4, "zero3, hsdp, tensor=4, ulysses=4, zero3 ulysses=2", "families", "sgd", 1, shares=True),
    *of(4, "ulysses=2 pipeline=2", "families", "sgd", 1, shares=True),
    *of(8, "context=2 tensor=2 pipeline=2", "llama", "sgd", 1, shares=True),
    *of(2, f"{ADAPTED[2]}, planned=2", "gpt", adapter="dora"),
    *of(2, ADAPTED[2], "families", adapter="lora"),
    *of(2, "planned=2", "llama", adapter="lora"),
    *of(4, f"{ADAPTED[4]}, planned=2 tensor=2", "gpt", "sgd", adapter="dora"),
    *of(4, ADAPTED[4], "families", "sgd", adapter="lora"),
    *of(4, "planned=2 tensor=2", "llama", "sgd", adapter="lora"),
    *of(4, "tensor=4", "families", "sgd", adapter="dora"),  # two ranks share a key head
    *of(8, "tensor=8", "families", "sgd", adapter="lora"),
    *of(2, MATRIX[2], "wide", "adamw", adapter="qlora"),
    *of(2, MATRIX[2], "wide", "sgd", adapter="qdora"),
    *of(2, MATRIX[2], "wide", "sgd", adapter="int8"),
    *of(4, f"{QUANTIZED}, zero3 tensor=2", "wide", "sgd", adapter="qlora"),
    *of(4, QUANTIZED, "wide", "sgd", adapter="qdora"),
    *of(4, f"{QUANTIZED}, zero3 tensor=2", "wide", "sgd", adapter="int8"),
]


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_ranks_train_as_one_process(pools, case):
    """One process has dequantized weights in the place of quantized ones."""
    fields = fields_of(case.strategy)
    # A pipeline divides four layers; two cost half the time.
    shape = replace(SHAPES[case.name], layers=4 if "pipeline" in fields else 2)
    arguments = shape, case.optimizer, case.steps, max(4, case.ranks)
    is_quantized = case.adapter and ADAPTERS[case.adapter].quantize != "none"
    reference = f"{case.adapter} dequantized" if is_quantized else case.adapter
    losses, norms, validation, weights = alone(*arguments, reference, "alike" if case.shares else "random")
    kind = "shared" if case.shares else "random"
    outcomes = pools(case.ranks).run(trained, fields, *arguments, case.adapter, kind)
    # Muon orthogonalizes in bfloat16; noise of rounded moments differs with the shards.
    rounding = {"muon": 20, "adamw_bf16": 20, "adamw_8bit": 60}.get(case.optimizer, 1)
    for found in (outcomes[0], outcomes[-1]):
        np.testing.assert_allclose(found[0], losses, rtol=1e-5 * rounding)
        np.testing.assert_allclose(found[1], norms, rtol=1e-4 * rounding)
        np.testing.assert_allclose(found[2], validation, rtol=1e-5 * rounding)
        for key, value in weights.items():
            limit = 1e-6 if case.optimizer == "sgd" else 2e-5 * rounding
            np.testing.assert_allclose(found[3][key], value, rtol=0, atol=limit, err_msg=key)
