"""Pipelines of 2 and 4 ranks against one process: losses, gradients, weights; what they hold, and what they refuse."""

import gc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models.decoder import PARALLEL_PLAN, Decoder, Part
from multipack.parallel.context import divide_context
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.pipeline import Pipeline
from multipack.parallel.schedules import Stage
from multipack.parallel.shard import shard
from multipack.parallel.stages import bubble, split_layers, stages_of_rank
from multipack.parallel.state import local, piece_of
from multipack.parallel.tensor import divide_tensors
from multipack.shapes import ModelShape

SLOTS, VOCABULARY, SEED = 48, 64, 5
LLAMA = ModelShape(
    layers=4, heads=4, kv_heads=2, d_model=32, d_ff=48, vocabulary_size=VOCABULARY, context=SLOTS, tied=False
)
GPT = replace(
    LLAMA,
    kv_heads=4,
    positions="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tied=True,
)
SHAPES = {"gpt": GPT, "llama": LLAMA}


def shape_of(name, layers=4):
    return replace(SHAPES[name], layers=layers)


def packs(count, step=0, slots=SLOTS, first=0):
    """Packs that all differ in their boundaries and in how many targets they have."""
    draw = np.random.default_rng(100 * step + first)
    collate = PackedCollator(max_documents=4, max_seqlen=slots, pad_to=slots)
    batches = []
    for number in range(count):
        lengths = draw.integers(3, slots // 3, 3)
        lengths[0] = 4 + number  # no two packs have one and the same first border
        documents = [
            Document(draw.integers(0, VOCABULARY, n).astype(np.uint16), np.array([[number % 3, n]]))
            for n in lengths
        ]
        batches.append(collate(documents))
    return batches


def scale_of(batches):
    return 1.0 / sum(batch.num_target_tokens for batch in batches)


def clip(gradients, squares, limit=0.1):
    norm = squares**0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def reference(name, micro_batches, layers=4, steps=3, ranks=1, autocast=False):
    """The same training in this process; with several data-parallel `ranks`, of the packs of all of them."""
    torch.manual_seed(SEED)
    model = Decoder(shape_of(name, layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        every = [packs(micro_batches, step, first=rank) for rank in range(ranks)]
        scale = scale_of([batch for batches in every for batch in batches])
        found = []
        for batches in every:
            found.append([])
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(batch)
                (loss * scale).backward()
                found[-1].append(float(loss.detach()))
        losses.append(found)
        gradients = gradients or {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
        squares = sum(float(p.grad.square().sum()) for p in model.parameters())
        norms.append(clip([p.grad for p in model.parameters()], squares))
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        evaluated = [float(model(batch)) for batch in packs(3, step=9)]
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": weights,
        "evaluated": evaluated,
    }


def make_stages(name, mesh, schedule, layers=4, divide=lambda model: None, dropout=0.0):
    """This rank's stages, filled with what one process would begin with."""
    shape = replace(shape_of(name, layers), dropout=dropout)
    numbers = stages_of_rank(mesh.get_local_rank(), mesh.size(), schedule)
    cuts = split_layers(layers, mesh.size() * len(numbers))
    stages = []
    for number in numbers:
        stage = Decoder(shape, part=Part(cuts[number].start, cuts[number].stop, layers))
        divide(stage)
        stages.append(stage)
    torch.manual_seed(SEED)
    values = {own: parameter.detach() for own, parameter in Decoder(shape).named_parameters()}
    for stage in stages:
        for own, parameter in stage.named_parameters():
            local(parameter.detach()).copy_(piece_of(values[own], parameter))
    return stages


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().numpy().copy()


def train(world, mesh, pipeline, micro_batches, *, steps=3, data_ranks=1, data_rank=0, **how):
    """A few steps of AdamW with clipping; what this rank saw and holds."""
    held = pipeline.parameters
    optimizer = torch.optim.AdamW(held.values(), lr=1e-2)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        every = [packs(micro_batches, step, first=rank) for rank in range(data_ranks)]
        scale = data_ranks * scale_of([batch for batches in every for batch in batches])
        losses.append(pipeline.forward_backward(every[data_rank], scale, **how))
        gradients = gradients or {n: whole(p.grad) for n, p in held.items()}
        own = {n: whole(p.grad) for n, p in held.items() if n not in pipeline.duplicates}
        # All ranks of a stage gathered the same: their sum counts each so often.
        squares = world.sum([sum(float(np.square(g, dtype=np.float64).sum()) for g in own.values())])[0]
        squares /= world.size // mesh.size()
        norms.append(clip([local(p.grad) for p in held.values()], squares))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": {n: whole(p) for n, p in held.items()},
        "evaluated": pipeline.evaluate(packs(3, step=9), **how),
        "duplicates": sorted(pipeline.duplicates),
        "last": pipeline.rank == pipeline.ranks - 1,
    }


def check(found, wanted, rank_of=lambda rank: 0, tolerance=1e-5):
    """Whether what ranks found is what one process does, and copies of a parameter are equal to the bit."""
    weights = {}
    for rank, each in enumerate(found):
        if each["last"]:
            told = [losses[rank_of(rank)] for losses in wanted["losses"]]
            np.testing.assert_allclose(each["losses"], told, rtol=tolerance)
            np.testing.assert_allclose(each["evaluated"], wanted["evaluated"], rtol=tolerance)
        else:
            assert not np.any(each["losses"])
            assert each["evaluated"] == [0.0] * 3
        # A key's bias has no gradient but rounding: its scale is that of the others.
        largest = max(np.abs(value).max() for value in wanted["gradients"].values())
        for name, value in each["gradients"].items():
            slack = tolerance * max(np.abs(wanted["gradients"][name]).max(), 0.01 * largest)
            np.testing.assert_allclose(value, wanted["gradients"][name], rtol=0, atol=slack, err_msg=name)
        for name, value in each["weights"].items():
            slack = 2 * tolerance
            np.testing.assert_allclose(value, wanted["weights"][name], rtol=slack, atol=slack, err_msg=name)
        for name, value in each["weights"].items():
            assert np.array_equal(weights.setdefault(name, value), value), name
    assert weights.keys() == wanted["weights"].keys()
    for each in found:
        np.testing.assert_allclose(each["norms"], wanted["norms"], rtol=tolerance)


def parity_case(world, name, schedule, micro_batches, layers):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    stages = make_stages(name, mesh, schedule, layers)
    calls = []
    for stage in stages:
        stage.register_forward_hook(lambda *_: calls.append(1))
    pipeline = Pipeline(stages, mesh, schedule, micro_batches, width=32)
    found = train(world, mesh, pipeline, micro_batches)
    return {**found, "calls": len(calls), "stages": len(stages)}


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("ranks", "schedule", "micro_batches"),
    [
        (2, "gpipe", 3),
        (2, "1f1b", 5),
        (2, "interleaved", 4),
        (4, "gpipe", 4),
        (4, "1f1b", 6),
        (4, "interleaved", 8),
    ],
)
def test_a_pipeline_trains_as_one_process_does(pools, name, ranks, schedule, micro_batches):
    layers = 8 if (ranks, schedule) == (4, "interleaved") else 4
    found = pools(ranks).run(parity_case, name, schedule, micro_batches, layers)
    check(found, reference(name, micro_batches, layers))
    tied = [["embedding.weight"] if rank == ranks - 1 and name == "gpt" else [] for rank in range(ranks)]
    assert [each["duplicates"] for each in found] == tied
    # Nothing but the steps' and the evaluation's own passes ran: torch's first look at shapes would be one more.
    passes = 3 * micro_batches + 3
    assert [each["calls"] for each in found] == [passes * each["stages"] for each in found]


class Counting(TorchDispatchMode):
    """Counts what is asked of process groups, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "c10d":
            self.counts[str(function)] += 1
        return function(*arguments, **(keywords or {}))


def sharded_case(world, name, schedule, micro_batches, kind):
    axes = (
        {"pp": 2, "dp_replicate": 1, "dp_shard": 2}
        if kind == "zero3"
        else {"pp": 2, "dp_replicate": 2, "dp_shard": 1}
    )
    root = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    data = root["dp_shard"] if kind == "zero3" else root["dp_replicate", "dp_shard"]
    data_rank = root["dp_shard" if kind == "zero3" else "dp_replicate"].get_local_rank()
    stages = make_stages(
        name, root["pp"], schedule, divide=lambda model: shard(model, data, reshard=kind == "zero3")
    )
    pipeline = Pipeline(stages, root["pp"], schedule, micro_batches, width=32)
    found = train(world, root["pp"], pipeline, micro_batches, data_ranks=2, data_rank=data_rank)
    with Counting() as counting:
        pipeline.forward_backward(packs(micro_batches), 1.0)
    return {
        **found,
        "counts": dict(counting.counts),
        "units": sum(len(stage.blocks) + (stage.part.is_first or stage.part.is_last) for stage in stages),
    }


@pytest.mark.parametrize(
    ("name", "schedule", "kind"),
    [
        ("gpt", "1f1b", "zero3"),
        ("llama", "interleaved", "zero3"),
        ("gpt", "interleaved", "replicas"),
        ("llama", "gpipe", "replicas"),
    ],
)
def test_stages_can_be_sharded_and_replicated(pools, name, schedule, kind):
    found = pools(4).run(sharded_case, name, schedule, 4, kind)
    check(found, reference(name, 4, ranks=2), rank_of=lambda rank: rank % 2)
    for each in found:  # a step reduces every unit once, whatever the number of micro-batches
        reductions = "reduce_scatter" if kind == "zero3" else "allreduce"
        assert sum(n for op, n in each["counts"].items() if reductions in op) == each["units"], each["counts"]


def divided_case(world, name, schedule):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stages = make_stages(
        name, root["pp"], schedule, divide=lambda model: divide_tensors(model, root["tp"], PARALLEL_PLAN)
    )
    pipeline = Pipeline(stages, root["pp"], schedule, 4, width=32, tensor_ranks=2)
    return train(world, root["pp"], pipeline, 4)


@pytest.mark.parametrize(("name", "schedule"), [("gpt", "1f1b"), ("llama", "interleaved")])
def test_stages_can_be_divided_by_tensor_parallelism(pools, name, schedule):
    check(pools(4).run(divided_case, name, schedule), reference(name, 4))


def context_case(world, method):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    shares = []

    def divide(model):
        shares.append(divide_context(model, root["cp"], method))
        shard(model, root["cp"], reshard=False)

    stages = make_stages("llama", root["pp"], "interleaved", divide=divide)
    pipeline = Pipeline(stages, root["pp"], "interleaved", 4, width=32)
    losses = pipeline.forward_backward(packs(4), 2 * scale_of(packs(4)), share=shares[0])
    gradients = {name: whole(parameter.grad) for name, parameter in pipeline.parameters.items()}
    return losses, gradients, pipeline.evaluate(packs(3, step=9), share=shares[0])


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_ranks_can_divide_the_tokens_of_what_stages_exchange(pools, method):
    found = pools(4).run(context_case, method)
    wanted = reference("llama", 4, steps=1)
    losses = [np.sum([each[part] for each in found], axis=0) for part in (0, 2)]
    np.testing.assert_allclose(losses[0], wanted["losses"][0][0], rtol=1e-5)
    for _, gradients, _ in found:
        for name, value in gradients.items():
            slack = 1e-5 * np.abs(wanted["gradients"][name]).max()
            np.testing.assert_allclose(value, wanted["gradients"][name], rtol=0, atol=slack, err_msg=name)
    torch.manual_seed(SEED)
    model = Decoder(shape_of("llama"))
    evaluated = [float(model(batch).detach()) for batch in packs(3, step=9)]
    np.testing.assert_allclose(losses[1], evaluated, rtol=1e-5)


def autocast_case(world):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    pipeline = Pipeline(make_stages("llama", mesh, "1f1b"), mesh, "1f1b", 4, width=32)
    return train(world, mesh, pipeline, 4, autocast=lambda: torch.autocast("cpu", torch.bfloat16))


def test_forward_passes_run_in_the_precision_asked_for(pools):
    wanted, exact = reference("llama", 4, autocast=True), reference("llama", 4)
    check(pools(2).run(autocast_case), wanted, tolerance=1e-4)
    assert np.abs(np.subtract(wanted["losses"], exact["losses"])).max() > 1e-3


def evaluation_case(world):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    stages = make_stages("gpt", mesh, "1f1b", dropout=0.5)
    stages[0].eval()
    stages[0].blocks.train()  # modes are put back as they were
    pipeline = Pipeline(stages, mesh, "1f1b", 2, width=32)
    state = torch.get_rng_state()
    losses = pipeline.evaluate(packs(5)) + pipeline.evaluate(packs(1)) + pipeline.evaluate(packs(2, slots=30))
    assert pipeline.evaluate([]) == []
    gc.collect()
    gc.disable()
    losses += pipeline.evaluate(packs(1))
    assert not [each for each in gc.get_objects() if type(each) is Stage]  # and its buffers went with it
    gc.enable()
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in pipeline.parameters.values())
    modes = [stages[0].training, stages[0].blocks.training]
    stages[0].train()
    trained = [pipeline.forward_backward(packs(2), 1.0)]
    before = {name: parameter.grad.clone() for name, parameter in pipeline.parameters.items()}
    losses += pipeline.evaluate(packs(1))
    assert all(torch.equal(before[name], parameter.grad) for name, parameter in pipeline.parameters.items())
    for parameter in pipeline.parameters.values():
        parameter.grad = None
    trained.append(pipeline.forward_backward(packs(2), 1.0))
    return losses, modes, trained


def test_evaluation_takes_any_packs_and_leaves_no_trace(pools):
    torch.manual_seed(SEED)
    model = Decoder(shape_of("gpt"))
    with torch.no_grad():
        wanted = [float(model(b)) for b in [*packs(5), *packs(1), *packs(2, slots=30), *packs(1), *packs(1)]]
    found = pools(2).run(evaluation_case)
    np.testing.assert_allclose(found[1][0], wanted, rtol=1e-5)
    assert not np.any(found[0][0])
    assert [modes for _, modes, _ in found] == [[False, True]] * 2
    once, again = found[1][2]
    assert once != again  # training drops out again, and anew


def refusal_case(world):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    stages = make_stages("gpt", mesh, "1f1b")
    pipeline = Pipeline(stages, mesh, "1f1b", 3, width=32)
    steps = [
        packs(2),
        [*packs(2), *packs(1, slots=30)],
        packs(3),
        packs(3),
        packs(3, slots=30),
        [*packs(1, slots=30), *packs(2)],
        packs(4),
    ]
    told = []
    for number, step in enumerate(steps):
        try:
            pipeline.forward_backward(step, 1.0)
            told.append("")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
        if number != 2:
            for parameter in pipeline.parameters.values():
                parameter.grad = None
    for make in (
        lambda: Pipeline(stages * 2, mesh, "1f1b", 3, width=32),
        lambda: Pipeline(stages, mesh, "1f1b", 1, width=32),
        lambda: Pipeline(stages * 2, mesh, "interleaved", 2, width=32),
        lambda: Pipeline(stages, mesh, "1f1b", 3, width=32, tensor_ranks=5).forward_backward(packs(3), 1.0),
        lambda: pipeline.evaluate([*packs(1), *packs(1, slots=30)]),
    ):
        try:
            make()
            told.append("")
        except ValueError as error:
            told.append(str(error))
    if world.rank == 0:  # what a stage gives is looked at before it is sent
        run = pipeline._training
        run.batches = packs(1, slots=30)
        try:
            run._schedule._stage.forward_maybe_with_nosync(number=torch.tensor([0]))
        except ValueError as error:
            told.append(str(error))
    return told


def test_what_would_hang_is_refused_on_every_rank(pools):
    found = pools(2).run(refusal_case)
    assert found[0].pop() == (
        "stage 0 of the pipeline gave (30, 32) of torch.float32, and the next one expects (48, 32) of torch.float32"
    )
    told = found[0]
    assert [message.replace("blocks.2.", "blocks.0.") for message in found[1]] == told
    assert told[0].startswith("this step has 2 micro-batches, and the pipeline was built for 3")
    assert told[1].startswith(
        "micro-batch 2 has 30 slots, and the first of them had 48: stages of a pipeline"
    )
    assert "train.fixed_shape=true" in told[1]
    assert "plan.capacity" in told[1]
    assert told[2] == ""
    assert told[3].startswith("embedding.weight has a gradient left from another step")
    assert told[4].startswith("micro-batch 0 has 30 slots, and those of the first step had 48")
    assert told[5].startswith("micro-batch 0 has 30 slots, and those of the first step had 48")
    assert told[6].startswith("this step has 4 micro-batches")
    assert told[7] == "parallel.schedule=1f1b has 1 stages on every rank, got 2"
    assert told[8].startswith(
        "parallel.pipeline=2 with parallel.schedule=1f1b needs at least 2 micro-batches a step"
    )
    assert told[9].startswith("two stages of one rank hold blocks.0.")
    assert told[10].startswith("a pack's 48 slots cannot be divided among parallel.tensor=5 ranks")
    assert told[11].startswith("micro-batch 1 has 30 slots, and the first of them had 48")


def failing_case(world):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    pipeline = Pipeline(make_stages("llama", mesh, "1f1b"), mesh, "1f1b", 2, width=32)
    batches = packs(2)
    batches[1].input_ids[0] = VOCABULARY
    pipeline.forward_backward(batches, 1.0)


def test_what_a_stage_refuses_is_told_and_nobody_waits_for_ever(pool_type):
    pool = pool_type(2, timeout_seconds=2.0)
    first, last = pool.outcomes(failing_case)
    assert f"ValueError: token {VOCABULARY} is outside the vocabulary" in first.error
    assert last.error
    assert "not done after" not in last.error


class Box:
    """A tensor saved for a backward pass, counted while it is."""

    alive = most = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Box.alive += 1
        Box.most = max(Box.most, Box.alive)

    def __del__(self):
        Box.alive -= 1


def memory_case(world, schedule):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    pipeline = Pipeline(make_stages("llama", mesh, schedule), mesh, schedule, 6, width=32)
    Box.alive = Box.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        pipeline.forward_backward(packs(6), 1.0)
    stage = pipeline._training._schedule._stage
    received = {id(info[0].buffer) for info in stage.args_recv_info.values() if info}
    gradients = {id(info[0].buffer) for info in stage.grad_recv_info.values() if info}
    return Box.most, Box.alive, len(received), len(gradients)


def test_1f1b_holds_as_many_micro_batches_as_there_are_ranks(pools):
    gpipe, bounded = (pools(4).run(memory_case, schedule) for schedule in ("gpipe", "1f1b"))
    for rank, ((all_of_them, *_), (most, left, received, gradients)) in enumerate(
        zip(gpipe, bounded, strict=True)
    ):
        in_flight = 4 - rank
        assert most == all_of_them // 6 * in_flight
        assert left == 0
        assert received == (in_flight if rank else 0)
        assert gradients == (2 if rank < 3 else 0)
    assert [each[2:] for each in gpipe] == [(0, 6), (6, 6), (6, 6), (6, 0)]


class Relay(nn.Module):
    """A stage that marks hidden states with the pack's first border, and refuses those of another pack."""

    def __init__(self, number, stages):
        super().__init__()
        self.scales = nn.ParameterDict({str(number): nn.Parameter(torch.ones(()))})
        self.first, self.last = number == 0, number == stages - 1

    def forward(self, batch, x=None):
        mark = float(batch.cu_seqlens[1])
        x = torch.full((batch.num_slots, 4), mark) if self.first else x
        assert torch.all(x == mark), f"hidden states of {float(x[0, 0])} beside a pack of {mark}"
        (scale,) = self.scales.values()
        x = x * scale
        return x.sum() if self.last else x


def relay_case(world, schedule, micro_batches):
    """Order of passes, and losses."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    numbers = stages_of_rank(world.rank, world.size, schedule)
    stages = [Relay(number, world.size * len(numbers)) for number in numbers]
    pipeline = Pipeline(stages, mesh, schedule, micro_batches, width=4)
    losses = pipeline.forward_backward(packs(micro_batches), 1.0)
    order = [(each.stage, each.micro_batch, each.kind) for each in pipeline.passes]
    return {"losses": losses, "order": order}


def idle_share(orders, stages):
    """Of ranks that run their passes in these orders, each as soon as it can: forward takes 1, backward 2."""
    done, free, left = {}, [0.0] * len(orders), [list(order) for order in orders]
    while any(left):
        for rank, order in enumerate(left):
            stage, number, kind = order[0] if order else (0, 0, "")
            forward = kind == "forward"
            needs = (stage - 1 if forward else stage + 1, number, kind)
            needed = stage == 0 if forward else stage == stages - 1
            if order and (needed or needs in done):
                began = max(free[rank], done.get(needs, 0.0))
                free[rank] = done[order.pop(0)] = began + (1.0 if forward else 2.0)
    busy = sum(1.0 if kind == "forward" else 2.0 for order in orders for *_, kind in order)
    return 1.0 - busy / (len(orders) * max(free))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_packs_stay_with_their_hidden_states_and_ranks_wait_as_the_formula_says(
    pools, schedule, ranks, micro_batches
):
    found = pools(ranks).run(relay_case, schedule, micro_batches)
    marks = [SLOTS * 4.0 * float(batch.cu_seqlens[1]) for batch in packs(micro_batches)]
    assert len(set(marks)) == micro_batches
    assert found[-1]["losses"] == marks
    orders = [[each for each in rank["order"] if each[2] != "reduce"] for rank in found]
    stages = ranks * len(stages_of_rank(0, ranks, schedule))
    passes = Counter(each for order in orders for each in order)
    assert len(passes) == 2 * micro_batches * stages == passes.total()
    config = ParallelConfig(pipeline=ranks, schedule=schedule)
    assert idle_share(orders, stages) == pytest.approx(bubble(config, micro_batches), abs=1e-9)
