"""`multipack plan --picture FILE`: the values that are drawn, against the plan itself, and the page."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from multipack.cli import app
from multipack.data.views.prefix_tree import PrefixTree
from multipack.data.views.shared_prefixes import FlatTokens, SharedPrefixes
from multipack.planning.options import PlanOptions
from multipack.planning.plan import plan
from multipack.planning.report import report
from multipack.reports.plan_page import MOST_DOCUMENTS, nines, plan_view
from multipack.reports.trees import nodes_of, rows_of


def _view(lengths, ranks=4, **options):
    made = plan(lengths, **{"capacity": 2048, "packs_per_step": 8, **options})
    return made, plan_view(made, report(made, ranks), 8, 0.5, "multipack train")


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(0).lognormal(5, 1, 600).clip(1, 2048).astype(np.int64)


def test_blocks_are_the_packs_and_the_padded_batches(lengths):
    made, view = _view(lengths)
    blocks = view["blocks"]
    packs = [pack for step in range(blocks["steps"]) for pack in made.packs(step)]
    assert (blocks["steps"], blocks["packs"]) == (3, len(packs)) == (3, 24)
    for number, pack in enumerate(packs):
        mine = [i for i, each in enumerate(blocks["pack"]) if each == number]
        assert [blocks["length"][i] for i in mine] == lengths[pack].tolist()
        assert [blocks["below"][i] for i in mine] == [0, *np.cumsum(lengths[pack])[:-1]]
    assert sorted(blocks["place"]) == list(range(len(blocks["length"])))
    in_order = [length for _, length in sorted(zip(blocks["place"], blocks["length"], strict=True))]
    batches = [in_order[start : start + 8] for start in range(0, len(in_order), 8)]
    assert blocks["longest"] == [max(batch) for batch in batches]
    assert blocks["padded_slots"] == sum(len(batch) * max(batch) for batch in batches)


def test_heat_is_the_cost_of_the_dealt_packs(lengths):
    made, view = _view(lengths)
    heat, costs = view["heat"], made.cost_model.cost(made.slots)
    table = np.array(
        [[costs[pack].sum() for pack in made.deal(step, 4)] for step in heat["steps"]], dtype=float
    )
    table = table.reshape(len(heat["steps"]), heat["micro_batches"], 4)
    np.testing.assert_allclose(heat["cost"], table / table.mean(), atol=1e-3)
    assert heat["slowest_rank"] == table.sum(axis=1).argmax(axis=1).tolist()
    waits = table.max(axis=2).sum(axis=1) / table.sum(axis=(1, 2)) * 4
    np.testing.assert_allclose(heat["slowest"], waits, rtol=1e-9)
    assert all(1 - 1e-9 <= least <= most for least, most in zip(heat["least"], heat["slowest"], strict=True))


def test_dials_and_histogram(lengths):
    made, view = _view(lengths)
    found = report(made, 4)
    fill, balance, randomness = view["dials"]
    assert fill["value"] == nines(found.efficiency) <= fill["ceiling"]
    assert balance["value"] == nines(found.cost_utilization) <= balance["ceiling"]
    assert 0 <= randomness["value"] <= 1
    assert [nines(share) for share in (0, 0.9, 0.99, 1)] == pytest.approx([0, 0.25, 0.5, 1])
    edges, counts = view["histogram"].values()
    assert (sum(counts), len(edges)) == (600, len(counts) + 1)
    assert [((lengths >= a) & (lengths < b)).sum() for a, b in pairwise(edges)] == counts
    assert [dial["name"] for dial in _view(lengths, ranks=1)[1]["dials"]] == ["fill", "randomness"]
    assert _view([7] * 40)[1]["histogram"] == {"edges": [7, 8], "counts": [40]}


def test_of_thousands_of_packs_some_are_drawn(lengths):
    _, view = _view(np.tile(lengths, 40), packs_per_step=4096, ranks=64)
    blocks = view["blocks"]
    assert blocks["all_packs"] > blocks["packs"] > 100
    assert MOST_DOCUMENTS / 2 < len(blocks["length"]) < 2 * MOST_DOCUMENTS
    assert len(json.dumps(view)) < 1_000_000
    assert np.array(view["heat"]["cost"]).shape[1:] == (64, 64)


def page_of(tmp_path, *words):
    """The values of the page that the command writes."""
    result = CliRunner().invoke(app, ["plan", *words, f"--picture={tmp_path / 'plan.html'}"])
    assert result.exit_code == 0, result.exception
    content = (tmp_path / "plan.html").read_bytes()
    return json.loads(re.search(rb'id="data">(.*?)</script>', content, re.DOTALL)[1])


def test_the_command_writes_the_page(lengths, tmp_path):
    np.save(tmp_path / "lengths.npy", lengths)
    sizes = ["plan.capacity=2048", "plan.packs_per_step=8", "world_size=4"]
    data = page_of(tmp_path, str(tmp_path / "lengths.npy"), *sizes)
    assert dict(data["rows"])["documents"] == "600"
    assert data["command"].startswith("multipack launch -n 4 -- train")


@pytest.fixture(scope="module", params=[False, True], ids=["documents", "pairs"])
def shared(request):
    """A plan of documents, or pairs, that share beginnings, with the tokens of both documents of each entry."""
    random, documents = np.random.default_rng(2), []
    for number in range(120):
        answer = random.integers(0, 2, 12)
        # Only first answers of pairs have more in common than their prompts, as items of pairs count it.
        answer[0] = 1000 + number if request.param and number % 2 else answer[0]
        documents.append(np.append([number // 40] * 30 + [number // 4] * 20, answer))
    entries = [documents[i : i + 1 + request.param] for i in range(0, 120, 1 + request.param)]
    options = PlanOptions(capacity=1024, packs_per_step=2)
    tokens = FlatTokens.of(documents)
    items = SharedPrefixes(tokens, groups=None, options=options, min_prefix=1, pairs=request.param).items()
    return plan(items, options=options), entries


def test_nodes_are_those_of_the_trees_of_the_items(shared):
    made, entries = shared
    for item in range(len(made.slots)):
        rows = rows_of(made.items, np.array([item]))
        documents = [each for entry in made.items.members[item] for each in entries[entry]]
        assert sorted(row.length for row in rows) == sorted(map(len, documents))
        tree = PrefixTree.of(documents, 1)
        paths = np.zeros(len(tree.length), dtype=int)
        for node in tree.last:
            while node >= 0:
                paths[node] += 1
                node = tree.parent[node]
        expected = sorted(zip(paths, tree.start, tree.length, strict=True))
        found = nodes_of(rows)
        assert sorted(node[1:] for node in found) == expected
        for first, count, start, length in found:
            inside = rows[first : first + count]
            assert all(row.shared >= start + length for row in inside[1:])
            assert all(row.length >= start + length for row in inside)


def test_blocks_of_shared_beginnings_are_the_slots_of_their_packs(shared):
    made, _ = shared
    view = plan_view(made, report(made), 8, 0.5, "multipack train")
    blocks, used = view["blocks"], [int(made.slots[pack].sum()) for pack in made.packs(0)]
    assert [
        sum(a for a, p in zip(blocks["added"], blocks["pack"], strict=True) if p == n) for n in (0, 1)
    ] == used
    assert sum(blocks["length"]) > sum(blocks["added"])
    assert sorted(blocks["place"]) == list(range(len(blocks["length"])))
    for tree, slots in zip(view["trees"], used, strict=False):
        assert tree["slots"] == slots < tree["tokens"]
        assert tree["rows"] < tree["documents"] or sum(node[3] for node in tree["nodes"]) == slots


def test_the_command_draws_shared_beginnings(tmp_path):
    rows = [{"prompt": f"Add the numbers. {n % 5} + 1 = ", "completion": f"{n}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", f"data.cache={tmp_path}"]
    data = page_of(tmp_path, *words, "tokenizer.kind=byte", "plan.capacity=512", "data.share_prefixes=all")
    assert data["trees"][0]["slots"] < data["trees"][0]["tokens"]
    assert max(rows for _, rows, *_ in data["trees"][0]["nodes"]) > 1


def test_another_kind_of_picture_is_refused(tmp_path):
    error = CliRunner().invoke(app, ["plan", str(tmp_path / "lengths.npy"), "--picture", "a.pdf"]).exception
    assert "must end with .html" in str(error)
