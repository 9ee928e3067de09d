"""benchmarks/packing: its measures by hand, every tool on drawn lengths, known losses of peers, the stored figures."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
CAPACITY, RANKS = 512, 4
NAMES = ("epoch", "measure", "page", "sets", "tools", "written")


@pytest.fixture(scope="module")
def bench(script):
    return {name: script(f"packing.{name}") for name in NAMES}


@pytest.fixture(scope="module")
def stored(figures):
    return figures("packing")


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(0).lognormal(4.5, 1.0, 1200).clip(1, CAPACITY).astype(np.int64)


def tool(bench, name):
    found = next(each for each in bench["tools"].TOOLS if each.name == name)
    if found.absent:
        pytest.skip(f"{found.package} is not installed")
    return found


def measured(bench, name, lengths, capacity=CAPACITY, ranks=RANKS):
    from multipack import pack

    fits = lengths[lengths <= capacity]
    return bench["measure"].measure(tool(bench, name), lengths, capacity, pack(fits, capacity), ranks)


def epoch_of(bench, packs, **more):
    return bench["epoch"].Epoch(*bench["epoch"].flat(packs), **more)


def test_measures_of_an_epoch_by_hand(bench):
    """Two ranks, two steps: document 3 is lost, document 0 repeated, document 2 truncated, one rank waits."""
    from multipack import pack

    lengths = np.array([4, 2, 6, 3])
    epoch = epoch_of(bench, [[0, 1], [2], [0], []], tokens=np.array([4, 2, 5, 4]))
    one = bench["tools"].Tool("one", lambda *_: epoch, "")
    cost = bench["measure"].COST.cost(np.array([4, 2, 5])).tolist()
    found = bench["measure"].measure(one, lengths, 6, pack(lengths, 6), 2)
    assert (found.steps, found.lost, found.repeated, found.cut, found.over, found.empty) == (2, 1, 1, 1, 0, 1)
    assert found.least_steps == 1  # 11 tokens
    assert found.fill == 11 / 24
    slowest = max(cost[0] + cost[1], cost[2]) + cost[0]
    assert found.balance == pytest.approx(2 * slowest / (2 * cost[0] + cost[1] + cost[2]))
    assert found.work == pytest.approx(2 * slowest / sum(cost))


def test_cost_of_padded_and_joined_rows(bench):
    load = bench["measure"].loads_of
    lengths, square = np.array([4, 2, 6]), lambda tokens: tokens * tokens
    loads = {
        rows: load(epoch_of(bench, [[0, 1], [], [2]], rows=rows), lengths, square).tolist()
        for rows in ("documents", "joined", "padded")
    }
    assert loads == {"documents": [20, 0, 36], "joined": [36, 0, 36], "padded": [32, 0, 36]}


def test_a_document_has_moved_as_far_as_its_step(bench):
    lengths, moved = np.array([5, 1, 9, 5, 5, 5, 5, 5]), bench["measure"].moved
    kept, turned = ([[n] for n in order] for order in (range(8), range(7, -1, -1)))
    assert moved(epoch_of(bench, kept), lengths, 2) == 0
    lengths = np.full(8, 5)  # steps of 10 tokens; places 2.5, 7.5, … 37.5, steps 30–40, 30–40, 20–30, …
    assert moved(epoch_of(bench, turned), lengths, 2) * 40 == pytest.approx(np.mean([27.5, 22.5, 7.5, 2.5]))
    same_step = epoch_of(bench, turned, step_of=np.zeros(4, dtype=np.int64))
    assert moved(same_step, lengths, 2) == 0


def test_the_bound_without_lost_documents_is_proven(bench):
    """Of four documents of 5 in packs of 8, one lost leaves three packs; of documents of 4, two."""
    from multipack import pack

    least = bench["measure"].least_steps
    for length, packs in ((5, 3), (4, 2)):
        fewest = pack([length] * 4, 8, "fewest")
        assert least(np.array([length] * 3 + [0]), 8, fewest, 1, cut=False) == packs


def all_tools():
    """Their names; those of packages that take seconds to import are slow."""
    sys.path.insert(0, FOLDER)
    tools = importlib.import_module("packing.tools").TOOLS
    sys.path.remove(FOLDER)
    quick = (None, "multipack", "lightbinpack")
    return [pytest.param(t.name, marks=() if t.package in quick else pytest.mark.slow) for t in tools]


LOSSLESS = {"multipack", "multipack, window 16", "multipack, not grouped", "LightBinPack, ogbfd"}
ONCE = LOSSLESS | {"multipack V2", "multipack V2, linear", "Axolotl", "Axolotl, sequential", "NeMo, first fit shuffle",
                   "verl, dynamic batches", "transformers, rebalance"}  # fmt: skip


@pytest.mark.parametrize("name", all_tools())
def test_every_tool_makes_packs_within_the_capacity(bench, lengths, name):
    found = tool(bench, name)
    lengths = lengths if name.startswith("verl") else lengths[:600]  # verl's steps have 1,024
    for seed in (0, None):
        epoch = found.run(lengths, CAPACITY, RANKS, seed)
        if epoch is None:
            assert seed is None
            continue
        assert (len(epoch.offsets) - 1) % RANKS == 0
        assert epoch.offsets[-1] == len(epoch.order)
        assert np.isin(epoch.order, np.arange(len(lengths))).all()
    figures = measured(bench, name, lengths)
    assert figures.steps >= figures.least_steps
    assert figures.balance >= 1
    assert figures.work >= 1
    if name != "transformers, rebalance":  # has no limit of tokens
        assert figures.over == 0
    assert figures.lost == len(lengths) - len(np.unique(found.run(lengths, CAPACITY, RANKS, 0).order))
    if name in ONCE:
        assert figures.repeated == 0
    if name in LOSSLESS:
        assert figures.lost == figures.repeated == figures.cut == 0
    if "wrapped" not in name:
        assert figures.cut == 0


def test_v2_as_its_readme_counts(bench):
    """37 steps without loss and 36 with, of OpenChat on eight ranks."""
    lengths = bench["sets"].SETS[0].read()
    if lengths is None:
        pytest.skip("../shared/data/lengths is not there")
    for name, steps in (("multipack_v2", 37), ("multipack_v2_linear", 36)):
        epoch = getattr(bench["written"], name)(lengths, 32_768, 8, 0)
        assert len(epoch.offsets) - 1 == 8 * steps


def test_known_losses_of_peers(bench):
    """One document that is too long ends V2's epoch; V2 linear loses a set smaller than a step."""
    lengths = np.full(400, 100)
    lengths[40] = CAPACITY + 1
    order = bench["epoch"].shuffled(400, 0)
    assert measured(bench, "multipack V2", lengths).lost >= 400 - np.flatnonzero(order == 40)[0]
    assert measured(bench, "multipack V2, linear", np.ones(100, dtype=np.int64)).lost == 100
    with pytest.raises(ValueError, match="longer than a pack"):
        measured(bench, "torchtune", lengths)
    with pytest.raises(ValueError, match="document 40 has 513 tokens"):
        measured(bench, "multipack", lengths)


@pytest.mark.slow
def test_axolotls_limit_of_documents(bench):
    assert measured(bench, "Axolotl", np.ones(4000, dtype=np.int64)).fill == 200 / CAPACITY


def test_lightbinpack_leaves_ranks_without_documents(bench):
    assert measured(bench, "LightBinPack, ogbfd", np.array([400, 10, 10]), ranks=8).empty >= 5


def naive(lengths, choose):
    """Packs by longest first and a rule that chooses among the rooms."""
    rooms = []
    for length in sorted(lengths.tolist(), reverse=True):
        fits = [number for number, room in enumerate(rooms) if room >= length]
        if fits:
            rooms[choose(fits, key=lambda number: rooms[number])] -= length
        else:
            rooms.append(CAPACITY - length)
    return sorted(rooms)


@pytest.mark.parametrize(("name", "choose"), [("Krell, SPFHP", max), ("Krell, LPFHP", min)])
def test_histogram_packings_are_worst_and_best_fit(bench, lengths, name, choose):
    epoch = tool(bench, name).run(lengths, CAPACITY, 1, 0)
    rooms = CAPACITY - bench["measure"].loads_of(epoch, lengths, lambda tokens: tokens)
    assert sorted(rooms.tolist()) == naive(lengths, choose)


def test_verls_micro_batches_stay_in_their_step(bench, lengths):
    epoch = bench["written"].verl(lengths, CAPACITY, RANKS, None)
    steps = bench["measure"].steps_of(epoch, RANKS)
    assert (epoch.order // 1024 == steps).all()
    assert np.bincount(steps).tolist() == [1024]


def test_stored_figures_have_every_tool_and_ours_loses_nothing(bench, stored):
    names = [each.name for each in bench["tools"].TOOLS]
    assert list(stored["tools"]) == names
    assert len(stored["sets"]) >= 10
    assert not stored["absent"]
    for each in stored["sets"].values():
        assert list(each["tools"]) == names
        for name in LOSSLESS:
            found = each["tools"][name]
            assert found["lost"] == found["repeated"] == found["cut"] == found["over"] == 0


def test_the_page_shows_the_stored_figures(bench, stored):
    """Written by `python benchmarks/packing --page`."""
    page = bench["page"]
    assert page.tables(stored) in page.PAGE.read_text(encoding="utf-8")


def test_the_picture_is_drawn_from_the_stored_figures(bench, stored, tmp_path):
    pytest.importorskip("matplotlib")
    bench["page"].draw(stored, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
