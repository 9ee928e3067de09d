"""Pipelines of 2 and 4 ranks: passes and collectives are counted, and what would hang is refused.

That they train as one process does is in test_parity.py.
"""

import gc
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import sharding as tiny
import torch
from torch import nn

from multipack.models.decoder import Decoder, DecoderPart
from multipack.parallel.mesh import build_mesh
from multipack.parallel.parallel_config import ParallelConfig
from multipack.parallel.pipeline import PipelineEngine, Stage
from multipack.parallel.stages import bubble, split_layers, stages_of_rank
from multipack.parallel.world import World

SLOTS, VOCABULARY, SEED = 48, 96, 5
SHAPES = {name: replace(shape, layers=4, context=SLOTS) for name, shape in tiny.SHAPES.items()}


def packs(count, step=0, slots=SLOTS):
    """Packs that all differ in their boundaries and in how many targets they have."""
    draw, batches = np.random.default_rng(step), []
    for number in range(count):
        # The first borders of all packs differ.
        lengths = [4 + number, *draw.integers(3, slots // 3, 2)]
        batches.append(tiny.packed(lengths, [step, number], VOCABULARY, slots))
    return batches


def make_stages(name, mesh, schedule, dropout=0.0):
    """This rank's stages, with the weights of one process's model."""
    shape = replace(SHAPES[name], dropout=dropout)
    torch.manual_seed(SEED)
    values = Decoder(shape).state_dict()
    split = split_layers(shape.layers, mesh.size() * len(stages_of_rank(0, mesh.size(), schedule)))
    stages = []
    for number in stages_of_rank(mesh.get_local_rank(), mesh.size(), schedule):
        stage = Decoder(shape, part=DecoderPart(split[number].start, split[number].stop, shape.layers))
        stage.load_state_dict({key: values[key] for key, _ in stage.named_parameters()})
        stages.append(stage)
    return stages


def pipeline_of(world, make, schedule, micro_batches, width=32):
    """An engine whose stages `make` gives, with plain gradient descent."""
    mesh = build_mesh(ParallelConfig(pipeline=world.size, schedule=schedule), world)
    stages = make(mesh.axis("pp"))
    descent = torch.optim.SGD([each for stage in stages for each in stage.parameters()], lr=0.1)
    more = {"schedule": schedule, "micro_batches": micro_batches, "width": width}
    return PipelineEngine(stages, descent, mesh, **more)


def engine_of(world, name, config, micro_batches, dtype=torch.float32):
    sgd = partial(torch.optim.SGD, lr=0.1)
    return tiny.engine_of(world, config, SHAPES[name], sgd, dtype, micro_batches)


def counted(world, name, words, micro_batches):
    """Calls of stages and collectives of a training step, and the number of FSDP units."""
    engine, calls = engine_of(world, name, ParallelConfig(**words), micro_batches), []
    for stage in engine.modules:
        stage.register_forward_hook(lambda *_: calls.append(1))
    batches = packs(micro_batches)
    with tiny.Communication() as seen:
        engine.forward_backward(batches, 1)
    engine.evaluate(packs(3))
    return {
        "calls": len(calls),
        "stages": len(engine.modules),
        "seen": dict(seen.calls),
        "units": sum(
            len(stage.blocks) + (stage.part.is_first or stage.part.is_last) for stage in engine.modules
        ),
        "duplicates": sorted(engine.duplicates),
    }


@pytest.mark.parametrize(
    ("name", "words", "reduction"),
    [
        ("gpt", {"data": "zero3"}, "reduce_scatter"),
        ("llama", {"data": "zero3", "schedule": "interleaved"}, "reduce_scatter"),
        pytest.param("llama", {"schedule": "gpipe"}, "allreduce", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_reduces_every_unit_once_and_runs_no_extra_passes(pools, name, words, reduction):
    micro_batches = 4
    found = pools(4).run(counted, name, {"pipeline": 2, **words}, micro_batches)
    for rank, each in enumerate(found):
        assert each["seen"][reduction] == each["units"], each
        # torch's inference of shapes would be one more pass.
        assert each["calls"] == (micro_batches + 3) * each["stages"]
        assert each["duplicates"] == (["embedding.weight"] if rank >= 2 and name == "gpt" else [])


def places_of(world, words):
    """Places of a rank in a step of four micro-batches."""
    watch = tiny.Places()
    engine = engine_of(replace(world, watch=watch), "llama", ParallelConfig(**words), 4)
    engine.forward_backward(packs(4), 1)
    engine.clip(1.0)
    engine.step(0.1)
    return watch.seen


@pytest.mark.parametrize(("words", "stages"), [({"pipeline": 2}, 5), ({"data": "zero3"}, 13)])
def test_all_ranks_pass_the_same_places(pools, words, stages):
    """Stages of a pipeline compute passes in different orders, which are one place."""
    first, second = pools(2).run(places_of, words)
    assert first == second == sorted(first)
    assert len(first) == stages


def in_bfloat16(world):
    """Losses, norm of the gradient, and casts of matrices of 64 × 32 (two in each of four blocks) in a step."""
    config = ParallelConfig(pipeline=2 if world.size > 1 else 1)
    engine, batches = engine_of(world, "llama", config, 4, torch.bfloat16), packs(4)
    with tiny.Casts((64, 32)) as casts:
        found = engine.forward_backward(batches, sum(batch.num_target_tokens for batch in batches))
    return found.losses, engine.clip(0.0), casts.count


def test_forward_passes_run_in_the_requested_precision(pools):
    """The weights are cast once a step; two replicas of the pipeline add up equal gradients."""
    wanted, norm, casts = in_bfloat16(World())
    assert casts == 8
    found = pools(4).run(in_bfloat16)
    np.testing.assert_allclose(found[-1][0], wanted, rtol=1e-5)
    assert found[0] == ([0.0] * 4, pytest.approx(2 * norm, rel=1e-3), 4)
    engine, batches = engine_of(World(), "llama", ParallelConfig(), 4), packs(4)
    exact = engine.forward_backward(batches, 1).losses
    assert np.abs(np.subtract(wanted, exact)).max() > 1e-4


def evaluated(world):
    pipeline = pipeline_of(world, lambda mesh: make_stages("gpt", mesh, "1f1b", dropout=0.5), "1f1b", 2)
    (stage,) = pipeline.modules
    stage.eval()
    stage.blocks.train()  # modes are put back as they were
    state = torch.get_rng_state()
    losses = pipeline.evaluate(packs(5)) + pipeline.evaluate(packs(1)) + pipeline.evaluate(packs(2, slots=30))
    assert pipeline.evaluate([]) == []
    gc.collect()
    gc.disable()
    losses += pipeline.evaluate(packs(1))
    assert not [each for each in gc.get_objects() if type(each) is Stage]  # and its buffers went with it
    gc.enable()
    assert torch.equal(state, torch.get_rng_state())
    assert not pipeline.gradients()
    modes = [stage.training, stage.blocks.training]
    stage.train()
    trained = [pipeline.forward_backward(packs(2), 1).losses]
    before = {name: gradient.clone() for name, gradient in pipeline.gradients().items()}
    losses += pipeline.evaluate(packs(1))
    assert all(torch.equal(before[name], gradient) for name, gradient in pipeline.gradients().items())
    pipeline.discard()
    trained.append(pipeline.forward_backward(packs(2), 1).losses)
    return losses, modes, trained


def test_evaluation_takes_any_packs_and_changes_nothing(pools):
    torch.manual_seed(SEED)
    model = Decoder(SHAPES["gpt"])
    with torch.no_grad():
        wanted = [float(model(b)) for b in [*packs(5), *packs(1), *packs(2, slots=30), *packs(1), *packs(1)]]
    found = pools(2).run(evaluated)
    np.testing.assert_allclose(found[1][0], wanted, rtol=1e-5)
    assert not np.any(found[0][0])
    assert [modes for _, modes, _ in found] == [[False, True]] * 2
    once, again = found[1][2]
    assert once != again  # training drops out again, and anew


def refused(world):
    make = lambda mesh: make_stages("gpt", mesh, "1f1b")  # noqa: E731
    pipeline, short = pipeline_of(world, make, "1f1b", 3), packs(1, slots=30)
    found = tiny.refusals(
        lambda: pipeline.forward_backward(packs(2), 1),
        lambda: pipeline.forward_backward([*packs(2), *short], 1),
    )
    pipeline.forward_backward(packs(3), 1)
    found += tiny.refusals(
        lambda: pipeline.forward_backward(packs(3, slots=30), 1),
        lambda: pipeline.evaluate([*packs(1), *short]),
    )
    if world.rank == 0:  # the output of a stage is checked before it is sent
        run = pipeline._training
        run.batches = short
        (message,) = tiny.refusals(
            lambda: run._schedule._stage.forward_maybe_with_nosync(number=torch.tensor([0]))
        )
        assert "stage 0 of the pipeline gave (30, 32)" in message
    return found


def test_what_would_hang_is_refused_on_every_rank(pools):
    patterns = (
        "2 micro-batches, and the pipeline was built for 3",
        "train.fixed_shape=true",
        "micro-batch 0 has 30 slots",
        "micro-batch 1 has 30 slots",
    )
    tiny.check_refusals(pools(2).run(refused), patterns)


def failing(world):
    pipeline = pipeline_of(world, lambda mesh: make_stages("llama", mesh, "1f1b"), "1f1b", 2)
    batches = packs(2)
    batches[1].input_ids[0] = VOCABULARY
    pipeline.forward_backward(batches, 1)


def test_an_error_of_a_stage_is_raised_and_no_rank_hangs(pool_type):
    pool = pool_type(2, timeout_seconds=1.0)
    first, last = pool.outcomes(failing)
    assert f"ValueError: token {VOCABULARY} is outside the vocabulary" in first.error
    assert last.error
    assert "not done after" not in last.error


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


def relayed(world, schedule, micro_batches):
    """Order of passes, and losses."""
    numbers = stages_of_rank(world.rank, world.size, schedule)
    stages = [Relay(number, world.size * len(numbers)) for number in numbers]
    pipeline = pipeline_of(world, lambda mesh: stages, schedule, micro_batches, width=4)
    losses = pipeline.forward_backward(packs(micro_batches), 1).losses
    return {"losses": losses, "order": [each[:3] for each in pipeline._training.passes]}


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


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 6), (4, 4)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_packs_stay_with_their_hidden_states_and_ranks_wait_as_the_formula_says(
    pools, schedule, ranks, micro_batches
):
    found = pools(ranks).run(relayed, schedule, micro_batches)
    marks = [SLOTS * 4.0 * float(batch.cu_seqlens[1]) for batch in packs(micro_batches)]
    assert len(set(marks)) == micro_batches
    assert found[-1]["losses"] == marks
    orders = [[each for each in rank["order"] if each[2] != "reduce"] for rank in found]
    stages = ranks * len(stages_of_rank(0, ranks, schedule))
    passes = Counter(each for order in orders for each in order)
    assert len(passes) == 2 * micro_batches * stages == passes.total()
    config = ParallelConfig(pipeline=ranks, schedule=schedule)
    assert idle_share(orders, stages) == pytest.approx(bubble(config, micro_batches), abs=1e-9)
