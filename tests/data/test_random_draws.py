"""Random draws: streams of their own, as many packs on every rank, exact state, and what they miss as computed."""

import importlib.util
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from multipack.data.collate import PackedCollator
from multipack.data.documents import Documents
from multipack.data.loader import PackedLoader
from multipack.data.random_draws import RandomDraws, coverage, expected_coverage
from multipack.data.sampler import PackedBatchSampler

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallel-io.md").read_text()
LENGTHS = np.clip(np.random.default_rng(1).lognormal(3, 0.8, 4000), 1, 200).astype(np.int64)


def make(rank=0, world_size=1, lengths=LENGTHS, epoch=0, **options):
    sampler = RandomDraws(lengths, 256, rank=rank, world_size=world_size, **options)
    sampler.set_epoch(epoch)
    return sampler


def numbers(sampler):
    return [number for pack in sampler for number in pack]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_rank_has_its_share_and_as_many_packs(world_size, replacement):
    samplers = [make(rank, world_size, replacement=replacement) for rank in range(world_size)]
    packs = [list(sampler) for sampler in samplers]
    assert {len(each) for each in packs} == {len(samplers[0])}
    for each, sampler in zip(packs, samplers, strict=True):
        drawn = [number for pack in each for number in pack]
        assert sampler.share == -(-4000 // world_size)
        assert len(drawn) >= sampler.share
        assert all(LENGTHS[pack].sum() <= 256 for pack in each)
        assert all(pack for pack in each)
        # draws in their order fill packs: the next document did not fit
        assert all(LENGTHS[a].sum() + LENGTHS[b[0]] > 256 for a, b in pairwise(each))
        stream = sampler.draws(sampler.rank)
        assert drawn[: sampler.share] == next(stream).tolist()
        if not replacement:
            assert len(set(drawn[: sampler.share])) == sampler.share
    assert len({tuple(numbers(sampler)) for sampler in samplers}) == world_size


def test_draws_follow_from_seed_epoch_and_rank():
    drawn = {
        (seed, epoch, rank): tuple(numbers(make(rank, 2, seed=seed, epoch=epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
        for rank in (0, 1)
    }
    assert len(set(drawn.values())) == 8
    assert tuple(numbers(make(1, 2, seed=1, epoch=1))) == drawn[1, 1, 1]  # as on every rank of its group


@pytest.mark.parametrize("replacement", [True, False])
def test_the_state_is_exact(replacement):
    def fresh(**options):
        return make(1, 3, replacement=replacement, **options)

    whole = list(fresh(epoch=2))
    first = fresh(epoch=2)
    packs = iter(first)
    begun = [next(packs) for _ in range(7)]
    state = json.loads(json.dumps(first.state_dict()))
    second = fresh()
    second.load_state_dict(state)
    assert second.epoch == 2
    assert second.state_dict() == state
    assert begun + list(second) == whole
    assert list(second) == whole  # iterators after that begin at the beginning
    for name, value in (("seed", 5), ("world_size", 2), ("documents", 3), ("replacement", not replacement)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            fresh().load_state_dict({**state, name: value})
    with pytest.raises(ValueError, match="outside an epoch"):
        fresh().load_state_dict({**state, "position": 10**6})
    with pytest.raises(ValueError, match="position"):
        fresh().load_state_dict({key: state[key] for key in state if key != "position"})


def test_a_changed_epoch_ends_an_iteration():
    sampler = make()
    packs = iter(sampler)
    next(packs)
    sampler.set_epoch(1)
    assert next(packs, None) is None


def test_it_is_a_sampler_for_loaders(write_store):
    store = write_store([[(int(length), True)] for length in LENGTHS[:200]])
    documents = Documents.whole(store)
    sampler = RandomDraws(documents.lengths, 256, seed=3)
    loader = PackedLoader(documents, sampler, PackedCollator.of(sampler))
    batches = list(loader)
    assert len(batches) == len(loader)
    drawn = numbers(RandomDraws(documents.lengths, 256, seed=3))
    assert loader.tokens_read == documents.lengths[drawn].sum()
    assert max(batch.num_documents for batch in batches) <= sampler.most_documents


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2 is outside world_size=2"),
        ({"seed": -1}, "seed"),
        ({"lengths": [300]}, "300"),
        ({"lengths": []}, "lengths|documents"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_coverage_counts():
    assert coverage([0, 0, 2, 3, 3, 3], 5) == (2 / 5, 2 / 5)
    assert coverage([], 4) == (1.0, 0.0)


def test_what_is_expected():
    missed, repeated = expected_coverage(10**6, 10**6)
    assert missed == pytest.approx(np.exp(-1), abs=1e-5)
    assert repeated == pytest.approx(1 - 2 / np.e, abs=1e-5)
    assert expected_coverage(1000, 1000, 1, replacement=False) == (0.0, 0.0)
    assert expected_coverage(1000, 1000, 2, replacement=False) == (0.25, 0.25)
    assert expected_coverage(1000, 1000, 1000, replacement=False)[0] == pytest.approx(np.exp(-1), abs=1e-3)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_what_an_epoch_misses_is_what_the_formula_says(world_size, replacement):
    """Within five standard deviations of a binomial count, which the true one is below."""
    seen = np.concatenate(
        [numbers(make(rank, world_size, replacement=replacement)) for rank in range(world_size)]
    )
    bound = 5 * np.sqrt(0.25 / 4000)
    for found, expected in zip(
        coverage(seen, 4000), expected_coverage(len(seen), 4000, world_size, replacement), strict=True
    ):
        assert found == pytest.approx(expected, abs=bound if world_size > 1 or replacement else 0.005)


def test_a_plan_misses_and_repeats_nothing():
    seen = []
    for rank in range(4):
        seen += numbers(PackedBatchSampler(LENGTHS, capacity=256, packs_per_step=8, rank=rank, world_size=4))
    assert coverage(seen, 4000) == (0.0, 0.0)


# The page


def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("draws_benchmark", ROOT / "benchmarks" / "draws.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_the_page_shows_the_figures_of_the_last_run():
    module = benchmark()
    result = json.loads((ROOT / "benchmarks" / "results" / "draws.json").read_text())
    assert module.table(result["rows"], result["epochs"]) in PAGE
    for row in result["rows"]:
        assert row["missed"] == pytest.approx(row["expected_missed"], abs=0.01)
        assert row["repeated"] == pytest.approx(row["expected_repeated"], abs=0.01)


def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    module = benchmark()
    out = tmp_path / "draws.json"
    words = ["--documents", "300", "--ranks", "1", "2", "--epochs", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["draws.py", *words])
    module.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["ranks"], row["way"]) for row in rows] == [
        (ranks, way) for ranks in (1, 2) for way in ("plan", "with replacement", "own shuffles")
    ]
    assert rows[0]["missed"] == rows[0]["repeated"] == rows[3]["missed"] == 0
    assert "| 2 | plan |" in capsys.readouterr().out


def test_the_pages_example_runs():
    (block,) = re.findall(r"<!-- tested -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], check=True, capture_output=True, text=True)
    shares = [float(share) for share in re.findall(r": ([\d.]+)% of the bytes", done.stdout)]
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert max(shares) < 26


def test_the_pages_commands_are_legal():
    from multipack.config import compose

    commands = re.findall(r"^multipack train (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        compose(command.split())
