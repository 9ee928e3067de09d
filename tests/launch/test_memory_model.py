"""Predicted bytes against those that torch holds: one process, the real decoder, both families."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.launch.held import blocks_held, largest_trained, model_parameters, outside_held
from multipack.launch.memory_model import Workload, memory_of_stages
from multipack.models.decoder import Decoder
from multipack.models.recompute import recompute_blocks
from multipack.parallel.engine import ModelEngine
from multipack.parallel.mesh import Mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.stages import RankPart
from multipack.parallel.world import World
from multipack.shapes import SHAPES, ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.training.optimizer import build_optimizer
from multipack.training.precision import DTYPES
from multipack.training.settings import OptimizerConfig

SLOTS = 512
LLAMA = ModelShape(4, 4, 2, 64, 224, vocabulary_size=300, tied=False, context=SLOTS)
FAMILY = {"positions": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
GPT = ModelShape(2, 4, d_model=64, d_ff=256, vocabulary_size=300, context=SLOTS, **FAMILY)
SHAPES_ = {
    "llama": LLAMA,
    "llama, tied, dropout": dataclasses.replace(LLAMA, tied=True, head_dim=24, dropout=0.1),
    "llama, large vocabulary": dataclasses.replace(LLAMA, layers=2, vocabulary_size=3000),
    "wide, short packs": dataclasses.replace(LLAMA, heads=8, d_model=256, d_ff=768),
    "gpt": GPT,
    "gemma3": dataclasses.replace(
        LLAMA,
        norm="rmsnorm+1",
        norms="around",
        head_norm="head",
        activation="geglu",
        window=100,
        full_every=2,
        window_theta=1e3,
    ),
    "olmo2": dataclasses.replace(LLAMA, norms="after", head_norm="all"),
}


class Held(TorchDispatchMode):
    """Bytes of all storages that operations made and that are alive: now, and at most so far."""

    def __init__(self, known):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive, self.peak = {}, 0

    @property
    def now(self):
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        return sum(size for _, size in self.alive.values())

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        self.now  # noqa: B018  # forget freed storages: their addresses may be used again
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return made


def decoder(shape, recompute="none"):
    torch.manual_seed(0)
    model = Decoder(shape)
    recompute_blocks(model, recompute)
    return model


def pack(slots=SLOTS):
    rng = np.random.default_rng(0)
    lengths = [length * slots // SLOTS for length in (200, 100, 84, 50, 78)]
    documents = [Document(rng.integers(0, 300, length), np.array([[0, length]])) for length in lengths]
    return PackedCollator(max_documents=8, max_seqlen=slots, pad_to=None, pad_id=0)(documents)


def loss_of(model, dtype):
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        return model(pack())


def memory(
    shape,
    dtype="bf16",
    recompute="none",
    micro_batches=1,
    ranks=1,
    device="gpu",
    optimizer="adamw",
    slots=SLOTS,
    **config,
):
    step = (slots, dtype, recompute, micro_batches, device, optimizer)
    work = Workload(shape, ParallelConfig(**config), ranks, *step)
    return max(memory_of_stages(work), key=lambda each: each.peak)


def test_blocks_and_the_rest_are_the_decoder():
    for name in ("tiny", "gpt2", "qwen2.5-0.5b", "gemma-3-1b", "olmo2-7b", "qwen3-8b"):
        shape = dataclasses.replace(
            SHAPES[name].with_vocabulary(SHAPES[name].vocabulary_size or 1000), layers=6
        )
        for each in (shape, dataclasses.replace(shape, scores=1)):
            held = blocks_held(each) * 6 + outside_held(each, RankPart(6))
            assert model_parameters(each) == round(held.trained)
            ends = [outside_held(each, RankPart(3, first, not first)).trained for first in (True, False)]
            again = each.tied * each.vocabulary_size * each.d_model  # both ends have a tied embedding
            assert sum(ends) - again == outside_held(each, RankPart(6)).trained


def test_tensor_ranks_and_adapters_divide_what_they_say():
    whole, half = (blocks_held(LLAMA, tensor=ranks) for ranks in (1, 2))
    assert half.matrices == whole.matrices / 2
    assert half.trained - half.matrices == whole.trained - whole.matrices  # norms
    some = AdapterConfig("lora", rank=8, targets=["blocks.1.attention.query"], quantize="int8")
    held = blocks_held(LLAMA, some) * LLAMA.layers
    assert (held.adapted_ranks, held.adapted_inputs, held.adapted_outputs) == (8, 64, 64)
    assert held.trained == 8 * (64 + 64)
    rows = 64 + 2 * 32 + 64 + 2 * 224 + 64
    assert held.quantized == pytest.approx(whole.matrices * 4 + 4 * rows * 4)
    assert largest_trained(LLAMA, some, 1) == 8 * 64


def test_state_is_exact_after_a_step():
    wide = ModelShape(1, 2, 2, 256, 512, vocabulary_size=320, context=512)
    for shape in (LLAMA, GPT, SHAPES_["gemma3"], wide):
        model = decoder(shape)
        loss_of(model, "fp32").backward()
        for name in ("adamw", "muon", "adamw_bf16"):
            optimizer = build_optimizer(model, OptimizerConfig(name=name))
            optimizer.step()
            found = memory(shape, optimizer=name)
            assert found.parameters == sum(each.nbytes for each in model.parameters())
            assert found.gradients == sum(each.grad.nbytes for each in model.parameters())
            slots = [value for slots in optimizer.state.values() for value in slots.values() if value.dim()]
            assert found.optimizer == sum(each.nbytes for each in slots)
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw_8bit"))
    optimizer.step()
    held = sum(each.nbytes for slots in optimizer.state.values() for each in slots.values())
    assert memory(wide, optimizer="adamw_8bit").optimizer == pytest.approx(
        held, rel=0.01
    )  # norms have float32


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("llama", "bf16"),
        ("llama, tied, dropout", "fp32"),
        ("llama, large vocabulary", "bf16"),
        ("gpt", "fp32"),
        ("gemma3", "bf16"),
        ("olmo2", "fp32"),
    ],
)
def test_saved_bytes_are_close_to_measured(shape, dtype, recompute):
    """All that stays after the forward pass."""
    shape = SHAPES_[shape]
    model = decoder(shape, recompute)
    with Held(model.parameters()) as held:
        loss = loss_of(model, dtype)
        saved = held.now
    assert loss.isfinite()
    found = memory(shape, dtype, recompute, device="cpu")
    copies = found.copies if recompute == "none" else 0
    assert found.activations + found.loss + copies == pytest.approx(saved, rel=0.04)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("shape", "dtype", "slots"),
    [
        ("llama", "bf16", SLOTS),
        pytest.param("llama, tied, dropout", "fp32", SLOTS, marks=pytest.mark.slow),
        pytest.param("llama, large vocabulary", "bf16", SLOTS, marks=pytest.mark.slow),
        pytest.param(
            "llama, large vocabulary", "fp32", 4 * SLOTS, marks=pytest.mark.slow
        ),  # two chunks of logits
        pytest.param(
            "wide, short packs", "bf16", SLOTS // 8, marks=pytest.mark.slow
        ),  # copies of weights are most of the memory
        ("gpt", "fp32", SLOTS),
    ],
)
def test_the_peak_of_a_step_is_close_to_measured(shape, dtype, slots, recompute):
    """Of a step of two packs: matrices are cast once for both, and stay until its end."""
    shape = SHAPES_[shape]
    model = decoder(shape, recompute)
    engine = ModelEngine([model], build_optimizer(model, OptimizerConfig()), Mesh(World()), DTYPES[dtype])
    batches = [pack(slots), pack(slots)]
    engine.forward_backward(batches, 2 * slots)
    with Held([*model.parameters(), *(each.grad for each in model.parameters())]) as held:
        engine.forward_backward(batches, 2 * slots)
    found = memory(shape, dtype, recompute, micro_batches=2, device="cpu", slots=slots)
    before = found.parameters + found.optimizer + found.gradients
    assert found.peak - before == pytest.approx(held.peak, rel=0.1)


def test_zero_divides_state():
    elements = model_parameters(LLAMA)
    for data, shards in (("ddp", 1), ("zero2", 4), ("zero3", 4), ("hsdp", 2)):
        found = memory(LLAMA, ranks=4, data=data)
        state = (found.parameters, found.gradients, found.optimizer)
        assert state == pytest.approx([size * elements // shards for size in (4, 4, 8)], abs=8), data
    gpt2 = SHAPES["gpt2"]  # zero1 assigns whole tensors to ranks
    shares = [memory(gpt2, ranks=ranks, data="zero1").optimizer for ranks in (2, 64)]
    assert shares == [8 * (model_parameters(gpt2) // 2), 8 * 50_257 * 768]
    offloaded = memory(LLAMA, ranks=4, data="zero3", offload="cpu")
    resident = memory(LLAMA, ranks=4, data="zero3")
    assert (offloaded.parameters, offloaded.gradients, offloaded.optimizer) == (0, 0, 0)
    assert offloaded.host == resident.parameters + resident.gradients + resident.optimizer
    files = memory(LLAMA, ranks=4, data="zero3", offload="disk", offload_folder="x")
    assert (files.host, files.disk) == (resident.gradients, resident.parameters + resident.optimizer)
    state = memory(LLAMA, ranks=4, data="zero2", offload="disk", offload_folder="x")
    assert (state.parameters, state.optimizer, state.disk) == (resident.parameters, 0, resident.optimizer)


def test_axes_divide_activations():
    shape = dataclasses.replace(LLAMA, kv_heads=4)
    saved = [Workload(shape, ParallelConfig(tensor=tensor), 4, SLOTS).saved_by_block() for tensor in (2, 4)]
    halved = {name for name, size in saved[0].items() if size and 2 * saved[1][name] == size}
    assert halved == {name for name, size in saved[0].items() if size} - {"projected"}  # gathered
    one, planned, ulysses = (
        memory(shape, ranks=4, **words).activations
        for words in ({}, {"context": 4, "context_method": "planned"}, {"context": 4})
    )
    assert 4 * planned == one
    assert planned < ulysses < 1.2 * planned
    deep, schedules = dataclasses.replace(LLAMA, layers=16), ("1f1b", "interleaved", "gpipe")
    peaks = [memory(deep, "fp32", "none", 8, 4, pipeline=4, schedule=each).peak for each in schedules]
    assert peaks == sorted(peaks)
