"""What distributed tests share: tiny decoders, packs with unequal targets, runs of the trainer, and counts."""

import hashlib
import io
import logging
import os
import re
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import PARALLEL_PLAN, Decoder, DecoderPart, initial_parameters
from multipack.ops.lora import add_adapters, initial_adapter, is_adapter, quantize
from multipack.ops.quantized import PARTS
from multipack.parallel.build import Blueprint, build_engine
from multipack.parallel.failures import Alone
from multipack.parallel.mesh import build_mesh
from multipack.parallel.state import local, piece_of
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.training import assemble, precision, train
from multipack.training.run_config import compose_run

GPT = ModelShape(
    layers=3,
    heads=4,
    d_model=32,
    d_ff=64,
    vocabulary_size=96,
    context=64,
    positions="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
)
LLAMA = ModelShape(layers=3, heads=4, kv_heads=2, d_model=32, d_ff=64, vocabulary_size=96, tied=False)
SHAPES = {"gpt": GPT, "llama": LLAMA}
SEED = 5


def with_switches(shape):
    """A shape with the switches of all families, as far as they go together."""
    return replace(
        shape,
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


class Places(Alone):
    """A `Watch` that records the places of its rank."""

    def __init__(self):
        self.seen = [(0, 0, "")]

    place = property(lambda self: self.seen[-1], lambda self, place: self.seen.append(place))


def packed(lengths, seed, vocabulary=96, pad_to=None, **options):
    """A pack of random tokens in documents of these lengths, which begin with prompts of random lengths."""
    draw, documents = np.random.default_rng(seed), []
    for length in lengths:
        tokens = draw.integers(0, vocabulary, length).astype(np.uint16)
        documents.append(Document(tokens, np.array([[draw.integers(0, length), length]])))
    return PackedCollator(40, pad_to or sum(lengths), pad_to=pad_to, **options)(documents)


def alike(seed, vocabulary, slots, shares):
    """A pack of documents that begin like earlier ones; they share these tokens, and fill `slots`, if `shares`."""
    draw, made, left = np.random.default_rng(seed), [[]], slots
    while left > 2:
        before = made[draw.integers(len(made))]
        begin = before[: draw.integers(min(len(before), 30) + 1)]
        own = draw.integers(0, vocabulary, min(left, draw.integers(2, 12))).tolist()
        made.append([*begin, *own])
        left -= len(own)
    documents = []
    for tokens in made[1:]:
        span = np.array([[draw.integers(0, len(tokens)), len(tokens)]])
        documents.append(Document(np.array(tokens, dtype=np.uint16), span))
    most = slots if shares else 40 * slots
    return PackedCollator(40, most, most if shares else None, min_prefix=1 if shares else None)(documents)


def pack(seed, capacity=64):
    """A pack of at most six documents; their lengths, and the number of targets, depend on the seed."""
    draw, lengths = np.random.default_rng(seed), []
    while capacity - sum(lengths) > 2 and len(lengths) < 6:
        lengths.append(int(min(capacity - sum(lengths), draw.integers(3, 30))))
    return packed(lengths, seed)


def packs_of_step(step, ranks, micro_batches=1):
    """Packs of every rank in a step, and the step's number of targets."""
    packs = [[pack(1000 * step + 10 * rank + m) for m in range(micro_batches)] for rank in range(ranks)]
    counts = [sum(each.num_target_tokens for each in own) for own in packs]
    assert ranks == 1 or len(set(counts)) > 1
    return packs, sum(counts)


def fresh(kind):
    torch.manual_seed(SEED)
    return Decoder(SHAPES[kind])


def on_meta(kind, part=None):
    with torch.device("meta"):
        return Decoder(SHAPES[kind], part=part)


def whole_shapes(kind):
    return {name: tuple(each.shape) for name, each in on_meta(kind).named_parameters()}


def drawn(kind):
    """What models on the meta device are filled from."""
    return initial_parameters(SHAPES[kind], SEED)


def blueprint(
    shape, head_layers=1.0, seed=SEED, adapter=None, dequantized=False, adapter_dtype=torch.float32
):
    """A decoder as engines ask for it: every process begins with the weights of one seed.

    `dequantized`: matrices are not quantized, and have the values that quantized ones stand for.
    """
    adapter = adapter or AdapterConfig()
    stored, adapter = adapter, replace(adapter, quantize="none") if dequantized else adapter
    with torch.device("meta"):
        whole = Decoder(shape)
    add_adapters(whole, adapter, adapter_dtype)
    shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
    saved = frozenset(name for name, each in whole.named_parameters() if each.requires_grad)
    dtypes = {name: each.dtype for name, each in whole.named_parameters() if each.dtype != torch.float32}
    drawn = initial_parameters(shape, seed)

    def frozen(name, device):
        value = drawn(name, device)
        is_matrix = name.startswith("blocks.") and value.dim() == 2
        quantized = stored.quantize != "none" and is_matrix
        return quantize(value, stored).to(torch.float32) if quantized else value

    def initial(name, device):
        module, _, own = name.rpartition(".")
        if own in PARTS:
            return quantize(drawn(f"{module}.weight", device), adapter).part(own)
        if not is_adapter(name):
            return frozen(name, device)
        value = initial_adapter(name, shapes[name], seed, lambda: frozen(f"{module}.weight", device))
        generator = torch.Generator().manual_seed(len(name))  # other than the neutral values
        return value + 0.1 * torch.randn(shapes[name], generator=generator)

    def build(blocks):
        torch.manual_seed(seed)
        model = Decoder(shape, part=None if blocks is None else DecoderPart(*blocks, shape.layers))
        add_adapters(model, adapter, adapter_dtype)
        if not next(model.parameters()).is_meta:
            model.load_state_dict({name: initial(name, "cpu") for name, _ in model.named_parameters()})
        return model

    made = Blueprint(build, shape.layers, shape.d_model, shapes, initial, PARALLEL_PLAN, head_layers)
    return replace(made, saved=saved if adapter.name != "none" else None, dtypes=dtypes)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def engine_of(world, config, shape, optimizer=adamw, dtype=torch.float32, micro_batches=1, **of_blueprint):
    """A decoder's engine; `optimizer` gets the parameters that are trained."""

    def build_optimizer(named):
        return optimizer([each for each in named.values() if each.requires_grad])

    plan, mesh = blueprint(shape, **of_blueprint), build_mesh(config, world)
    return build_engine(plan, build_optimizer, mesh, config, dtype, micro_batches=micro_batches)


def mesh_of(**sizes):
    """Torch's mesh of all ranks, with these axes; a pool's process makes it once (pool.py)."""
    return device_mesh.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def refusals(*calls):
    """The messages of calls that are refused."""
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def check_refusals(found, patterns):
    """Whether all ranks have the same messages, with these patterns."""
    assert all(each == found[0] for each in found)
    for pattern, message in zip(patterns, found[0], strict=True):
        assert re.search(pattern, message), message


def together(world, model, call, updates, steps, synchronizing, micro_batches=1):
    """Training on all ranks; the losses of its steps."""
    losses = []
    for step in range(steps):
        packs, targets = packs_of_step(step, world.size, micro_batches)
        total = 0.0
        for number, each in enumerate(packs[world.rank]):
            with synchronizing(number == micro_batches - 1):
                loss = call(each) * (world.size / targets)
                loss.backward()
            total += float(loss.detach()) / world.size
        updates.step()
        updates.zero_grad()
        losses.append(world.sum([total])[0])
    return losses


def train_here(world, words, cache):
    """`multipack train` on the pool's ranks; what it printed, and what torch warned of."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    printed = io.StringIO()
    precision.matmul_peak = lambda *_: 1e11
    warned = logging.StreamHandler(printed)
    logging.getLogger("torch.distributed.tensor").addHandler(warned)
    try:
        here = mock.patch.object(assemble, "connected", return_value=nullcontext(world))
        with here, redirect_stdout(printed):
            train.train(compose_run(words))
    finally:
        logging.getLogger("torch.distributed.tensor").removeHandler(warned)
    return printed.getvalue()


class Whole:
    """A source of whole tensors in memory."""

    def __init__(self, tensors):
        self.tensors = tensors

    def shapes(self, group):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.get(group, {}).items()}

    @torch.no_grad()
    def fill(self, group, into):
        for name, tensor in into.items():
            local(tensor).copy_(piece_of(self.tensors[group][name], tensor))


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def whole_parameters(engine):
    """Name → whole value of every parameter, equal on every rank; collective."""
    found = {}
    for name, shape in engine.shapes.items():
        if name.rpartition(".")[2] in PARTS:  # those of a quantized matrix, which does not change
            continue
        value = torch.zeros(shape)
        if name in engine.parameters and name not in engine.duplicates:
            value = _whole(engine.parameters[name].detach()).clone(memory_format=torch.contiguous_format)
        if engine.mesh.sizes["pp"] > 1:
            group = engine.mesh.axis("pp").get_group()
            dist.all_reduce(value, group=group)  # other stages add zeros
            holders = torch.tensor(float(name in engine.parameters and name not in engine.duplicates))
            dist.all_reduce(holders, group=group)  # several, of a frozen embedding that is also the head
            value /= holders
        found[name] = value
    return found


@torch.no_grad()
def largest_difference(model, reference):
    """Over all weights, which shards are gathered for."""
    expected = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    return max(float((_whole(found[name]) - expected[name]).abs().max()) for name in expected)


def state_hash(state):
    """sha256 over names and bytes of the tensors that this rank holds, by group and name."""
    digest = hashlib.sha256()
    for group in sorted(state):
        for name, tensor in sorted(state[group].items()):
            digest.update(f"{group}.{name}".encode())
            digest.update(local(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Casts(TorchDispatchMode):
    """Counts casts of tensors of a shape to bfloat16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator.name() == "aten::_to_copy" and out.shape == self.shape:
            self.count += out.dtype == torch.bfloat16
        return out


class Communication(TorchDispatchMode):
    """Counts collectives, and the numbers that went into reductions and came out of gathers."""

    def __init__(self):
        super().__init__()
        self.calls, self.elements = Counter(), Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            name = function._opname.strip("_").removesuffix("_base")
            tensors = arguments[0] if isinstance(arguments[0], list | tuple) else [arguments[0]]
            if name == "reduce_scatter":
                tensors = [arguments[1]]
            self.calls[name] += 1
            self.elements[name] += sum(each.numel() for each in tensors)
        return function(*arguments, **(options or {}))
