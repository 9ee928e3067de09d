"""The parity matrix: every strategy, and their combinations, against one process: losses, norms, weights.

Four packs of unequal target counts make a global step, or as many as there are ranks.
"""

import functools
import tempfile
from dataclasses import replace

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
# Switches of all families, as far as they go together.
# Ranks divide rows of 128 numbers without a cut in blocks of 64.
SHAPES["wide"] = replace(SHAPES["llama"], d_model=64, head_dim=16, d_ff=128)
SHAPES["families"] = replace(
    SHAPES["llama"],
    norm="rmsnorm+1",
    norms="around",
    head_norm="head",
    activation="geglu",
    qkv_bias=True,
    window=9,
    full_every=2,
    window_theta=100.0,
    unrotated_every=2,
    rope_width=2,
    embedding_scale=3.0,
    residual_scale=0.5,
    attention_scale=0.6,
    attention_growth=0.5,
    rope_context=8,
    attention_cap=2.0,
    logit_cap=3.0,
    logit_divisor=2.0,
)
# All matrices have one shape: for each, torch's first step with Muon on tensor ranks compares placements for seconds.
SQUARE = replace(SHAPES["llama"], kv_heads=8, d_ff=32)


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


def shape_of(name, words):
    """Four layers for a pipeline, which divides them; two layers, which cost half the time, otherwise."""
    shape = SQUARE if name == "square" else SHAPES[name]
    return replace(shape, layers=4 if words.get("pipeline", 1) > 1 else 2)


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


def case(world, words, *arguments):
    folder = {"offload_folder": tempfile.gettempdir()} if words.get("offload") == "disk" else {}
    config = ParallelConfig(**words, **folder).resolved(arguments[0], arguments[-1] == "shared")
    config.check(arguments[0], world.size, SLOTS)
    found = run(build_mesh(config, world), config, *arguments)
    return found if world.rank in (0, world.size - 1) else None


@functools.cache
def alone(*arguments):
    """The reference: one process."""
    return run(Mesh(World()), ParallelConfig(), *arguments)


def check(pool, words, name, optimizer, steps=2, adapter="", shares=False):
    arguments = shape_of(name, words), optimizer, steps, max(4, pool.size)
    reference = (
        f"{adapter} dequantized" if ADAPTERS.get(adapter, AdapterConfig()).quantize != "none" else adapter
    )
    losses, norms, validation, weights = alone(*arguments, reference, "alike" if shares else "random")
    outcomes = pool.run(case, words, *arguments, adapter, "shared" if shares else "random")
    for found in (outcomes[0], outcomes[-1]):
        # Muon orthogonalizes in bfloat16; noise of rounded moments differs with the shards.
        rounding = {"muon": 20, "adamw_bf16": 20, "adamw_8bit": 60}.get(optimizer, 1)
        np.testing.assert_allclose(found[0], losses, rtol=1e-5 * rounding)
        np.testing.assert_allclose(found[1], norms, rtol=1e-4 * rounding)
        np.testing.assert_allclose(found[2], validation, rtol=1e-5 * rounding)
        for key, value in weights.items():
            limit = 1e-6 if optimizer == "sgd" else 2e-5 * rounding
            np.testing.assert_allclose(found[3][key], value, rtol=0, atol=limit, err_msg=key)


ZERO = [{"data": data} for data in ("zero1", "zero2", "zero3")]
ALONE = [
    {},
    *ZERO,
    {"data": "zero3", "offload": "cpu"},
    {"tensor": 2},
    {"context": 2, "context_method": "ulysses"},
    {"context": 2, "context_method": "planned"},
    {"pipeline": 2, "schedule": "gpipe"},
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "interleaved"},
]
FOUR = [
    {},
    *ZERO,
    {"data": "hsdp"},
    {"tensor": 4},
    {"context": 4, "context_method": "ulysses"},
    {"context": 4, "context_method": "planned"},
    {"pipeline": 4},
    {"pipeline": 4, "schedule": "gpipe"},
    {"data": "hsdp", "replicate": 4},
    {"data": "zero3", "offload": "cpu", "tensor": 2},
]
PAIRS = [
    {"data": "zero1", "tensor": 2},
    {"data": "zero3", "tensor": 2},
    {"data": "zero1", "context": 2, "context_method": "planned"},
    {"data": "zero3", "context": 2, "context_method": "ulysses"},
    {"data": "zero1", "pipeline": 2},
    {"data": "zero2", "pipeline": 2, "schedule": "gpipe"},
    {"data": "zero3", "pipeline": 2, "schedule": "interleaved"},
    {"tensor": 2, "pipeline": 2, "schedule": "interleaved"},
    {"context": 2, "context_method": "planned", "tensor": 2},
    {"context": 2, "context_method": "ulysses", "pipeline": 2},
    {"data": "zero3", "context": 2, "context_slack": 0.25, "context_method": "planned", "tensor": 2},
]
MORE_PAIRS = [
    *({"tensor": 2}, {"context": 2, "context_method": "ulysses"}, {"pipeline": 2}),  # beside ddp
    {"data": "zero2", "tensor": 2},
    {"tensor": 2, "pipeline": 2},
    {"context": 2, "context_method": "ulysses", "tensor": 2},
]
EIGHT = [
    {"tensor": 2, "pipeline": 2},
    {"data": "zero1", "tensor": 2, "pipeline": 2},
    {"data": "zero3", "tensor": 2, "pipeline": 2, "schedule": "interleaved"},
    {"data": "zero2", "context": 2, "context_method": "ulysses", "tensor": 2},
    {"data": "hsdp", "tensor": 2},
    {"data": "hsdp", "pipeline": 2},
    {"data": "hsdp", "context": 2, "context_method": "ulysses"},
    {"data": "zero3", "context": 2, "context_method": "planned", "pipeline": 2},
    {"context": 2, "context_method": "ulysses", "tensor": 2, "pipeline": 2},
    {"context": 2, "context_method": "planned", "tensor": 2, "pipeline": 2, "schedule": "gpipe"},
    {"data": "hsdp", "context": 2, "context_method": "ulysses", "tensor": 2},
    {"data": "hsdp", "replicate": 4, "tensor": 2},
    {"data": "zero1", "context": 2, "context_method": "ulysses", "tensor": 2},
    {"data": "zero1", "pipeline": 4},
    {"data": "zero2", "context": 2, "context_method": "planned", "pipeline": 2, "schedule": "interleaved"},
    {"data": "zero2", "offload": "cpu", "tensor": 2, "pipeline": 2},
    {"tensor": 2, "pipeline": 4},
    {"context": 4, "context_method": "planned", "tensor": 2},
    {"context": 8, "context_method": "planned"},
]
MATRIX = {2: ALONE, 4: [*FOUR, *PAIRS, *MORE_PAIRS], 8: EIGHT}


def label(words):
    return "-".join(f"{key}={value}" for key, value in words.items()) or "ddp"


@pytest.mark.parametrize("words", ALONE, ids=label)
def test_every_method_alone_on_two_ranks(pools, words):
    check(pools(2), words, "llama", "adamw")


DISK = [
    *({"data": data, "offload": "disk"} for data in ("ddp", "zero1", "zero2", "zero3")),
    {"data": "ddp", "offload": "disk", "pipeline": 2},
    {"data": "hsdp", "offload": "disk", "tensor": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("words", DISK, ids=label)
def test_files_on_ranks(pools, words):
    check(pools(4 if "tensor" in words else 2), words, "llama", "adamw")


SLOW_MUON = [
    *((2, ALONE[number]) for number in (0, 1, 2, 5, 6, 9)),
    (4, PAIRS[1]),
    (4, PAIRS[4]),
    (4, FOUR[4]),
]


@pytest.mark.parametrize(
    ("ranks", "words", "name"),
    [
        (2, ALONE[3], "llama"),
        pytest.param(2, ALONE[5], "square", marks=pytest.mark.slow),
        *(pytest.param(*case, "llama", marks=pytest.mark.slow) for case in SLOW_MUON),
    ],
    ids=str,
)
def test_muon(pools, ranks, words, name):
    check(pools(ranks), words, name, "muon", steps=1)


COMPACT = [
    (2, {"data": "zero3", "offload": "disk"}, "adamw_8bit"),
    *((2, {"data": data}, "adamw_8bit") for data in ("zero1", "zero2")),
    (2, {"data": "zero3", "offload": "cpu"}, "adamw_8bit"),
    (4, {"data": "hsdp", "pipeline": 2}, "adamw_8bit"),
    (2, {"data": "zero1"}, "adamw_bf16"),
    (4, {"data": "zero3", "tensor": 2}, "adamw_bf16"),
]


@pytest.mark.parametrize(
    ("ranks", "words", "optimizer"),
    [COMPACT[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPACT[1:])],
    ids=str,
)
def test_compact_moments(pools, ranks, words, optimizer):
    check(pools(ranks), words, "llama", optimizer, steps=3)


FAMILIES = [PAIRS[9], FOUR[3], FOUR[4], FOUR[5], FOUR[6], FOUR[11], PAIRS[6]]


@pytest.mark.parametrize(
    "words",
    [FAMILIES[0], *(pytest.param(words, marks=pytest.mark.slow) for words in FAMILIES[1:])],
    ids=label,
)
def test_switches_of_families_on_four_ranks(pools, words):
    check(pools(4), words, "families", "sgd", steps=1)


SHARED = (4, "llama", {"context": 2, "tensor": 2})
MORE_SHARED = [
    (4, "gpt", {"data": "zero1", "pipeline": 2}),
    (2, "llama", {"data": "zero3"}),
    *((2, "gpt", words) for words in ALONE if words.get("context_method") != "planned"),
    *((4, "families", words) for words in (FOUR[3], FOUR[4], FOUR[5], FOUR[6], PAIRS[3], PAIRS[9])),
    (8, "llama", {"context": 2, "tensor": 2, "pipeline": 2}),
]


@pytest.mark.parametrize(
    ("ranks", "name", "words"),
    [SHARED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_SHARED)],
    ids=str,
)
def test_documents_that_share_their_beginnings_equal_those_that_do_not(pools, ranks, name, words):
    check(pools(ranks), words, name, "sgd", steps=1, shares=True)


def test_three_dimensions_on_eight_ranks(pools):
    check(pools(8), EIGHT[2], "llama", "sgd", steps=1)


SLOW_ADAPTED = [
    (ranks, words, name, adapter)
    for ranks, found in (
        (2, [ALONE[5], ALONE[6], ALONE[7], ALONE[9], ALONE[10], *ZERO, ALONE[4]]),
        (4, [FOUR[4], FOUR[5], *PAIRS[:2], PAIRS[6], PAIRS[7], PAIRS[8], PAIRS[9]]),
        (8, [{"tensor": 8}]),
    )
    for words in found
    for name, adapter in (
        ("gpt", "dora"),
        ("llama" if words.get("context_method") == "planned" else "families", "lora"),
    )
    if ranks < 8 or name != "gpt"  # which has 4 heads
]


@pytest.mark.parametrize(
    ("ranks", "words", "name", "adapter"),
    [
        (2, {}, "gpt", "lora"),
        # Two ranks share a key head.
        pytest.param(4, {"tensor": 4}, "families", "dora", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_ADAPTED),
    ],
    ids=str,
)
def test_adapters(pools, ranks, words, name, adapter):
    check(pools(ranks), words, name, "adamw" if ranks == 2 else "sgd", adapter=adapter)


QUANTIZED = [(2, words) for words in ALONE] + [(4, PAIRS[6]), (4, PAIRS[7]), (4, PAIRS[9])]


@pytest.mark.parametrize(
    ("ranks", "words", "adapter"),
    [
        (4, PAIRS[1], "qdora"),
        *(pytest.param(4, PAIRS[1], adapter, marks=pytest.mark.slow) for adapter in ("qlora", "int8")),
        *(
            pytest.param(*case, adapter, marks=pytest.mark.slow)
            for case in QUANTIZED
            for adapter in ("qlora", "qdora", "int8")
        ),
    ],
    ids=str,
)
def test_quantized_weights_equal_dequantized_ones_in_one_process(pools, ranks, words, adapter):
    check(
        pools(ranks), words, "wide", "adamw" if ranks == 2 and adapter == "qlora" else "sgd", adapter=adapter
    )


# Optimizers do not know models: each strategy has both models and both optimizers, crossed in one way.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [("gpt", "adamw"), ("llama", "sgd")])
@pytest.mark.parametrize(
    ("ranks", "words"),
    [(ranks, words) for ranks in MATRIX for words in MATRIX[ranks]],
    ids=str,
)
def test_the_whole_matrix(pools, ranks, words, name, optimizer):
    check(pools(ranks), words, name, optimizer, steps=3)
