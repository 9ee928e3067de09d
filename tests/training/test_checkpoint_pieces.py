"""Checkpoints whose tensors were written in pieces: read back exactly, and never believed where they are damaged."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from multipack.run import RunDirectory
from multipack.training.checkpoint import load_checkpoint, save_checkpoint
from multipack.training.sharded import Box, Entry, _misfit, index_of_pieces, read_into, read_whole

WEIGHT = torch.arange(20.0).reshape(5, 4)
BIAS = torch.arange(5.0) - 2


def _write(folder, whole, boxes):
    """The layout by hand: tensor → a box for each file (None = the file has nothing of it)."""
    folder.mkdir(exist_ok=True)
    table, contents = {}, {}
    for name, places in boxes.items():
        pieces = []
        for number, box in enumerate(places, start=1):
            if box is None:
                continue
            file = f"shard-{number:05d}.safetensors"
            values = whole[name][box.slices(Box((0,) * len(box.sizes), whole[name].shape))]
            contents.setdefault(file, {})[name] = (values.clone(), list(box.offsets))
            pieces.append([file, list(box.offsets), list(box.sizes)])
        table[name] = {"shape": list(whole[name].shape), "pieces": pieces}
    for file, held in contents.items():
        marks = {name: {"saved_offsets": offsets} for name, (_, offsets) in held.items()}
        tensors = {name: values for name, (values, _) in held.items()}
        save_file(tensors, folder / file, {"DCP_SHARDING_INFO": json.dumps(marks)})
    (folder / "index.json").write_text(json.dumps({"tensors": table}))
    return sorted(contents)


def _resized(path):
    """Let state.json believe the sizes that files have now."""
    state = json.loads((path / "state.json").read_text())
    state["files"] = {name: (path / name).stat().st_size for name in state["files"]}
    (path / "state.json").write_text(json.dumps(state))


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose model two ranks wrote: rows 0–2, and rows 3–4."""
    run = RunDirectory(tmp_path / "run")
    run.create("seed: 1\n")
    path = save_checkpoint(run, 3, {"optimizer": {}}, {}, {"rank-0.cpu": torch.zeros(1)}, {}, 0)
    boxes = {
        "weight": [Box((0, 0), (3, 4)), Box((3, 0), (2, 4))],
        "bias": [Box((0,), (3,)), Box((3,), (2,))],
    }
    shards = _write(path / "model", {"weight": WEIGHT, "bias": BIAS}, boxes)
    state = json.loads((path / "state.json").read_text())
    state |= {"format": 2, "groups": ["model", "optimizer"], "divided": ["model"]}
    state["files"] |= {
        f"model/{name}": (path / "model" / name).stat().st_size for name in [*shards, "index.json"]
    }
    (path / "state.json").write_text(json.dumps(state))
    (path / ".complete").write_text("3\n")
    return path


def test_pieces_are_put_together(checkpoint):
    found = load_checkpoint(checkpoint).whole("model")
    assert torch.equal(found["weight"], WEIGHT)
    assert torch.equal(found["bias"], BIAS)
    into = {"weight": torch.zeros(5, 4, dtype=torch.float64)}
    load_checkpoint(checkpoint).source.fill("model", into)
    assert torch.equal(into["weight"], WEIGHT.double())


def test_without_its_last_file_it_is_not_complete(checkpoint):
    (checkpoint / ".complete").unlink()
    with pytest.raises(ValueError, match=r"step-00000003 is not a complete checkpoint: \.complete.* older"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["shard-00002.safetensors", "index.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_torn_or_missing_file_is_named(checkpoint, name, damage):
    if damage == "truncate":
        os.truncate(checkpoint / "model" / name, 20)
    else:
        (checkpoint / "model" / name).unlink()
    with pytest.raises(ValueError, match=rf"model/{name} (has 20 bytes|is missing)"):
        load_checkpoint(checkpoint)


def _swap(folder):
    first, second = folder / "shard-00001.safetensors", folder / "shard-00002.safetensors"
    os.rename(first, folder / "swap")
    os.rename(second, first)
    os.rename(folder / "swap", second)


def _garble(folder):
    data = bytearray((folder / "shard-00002.safetensors").read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    (folder / "shard-00002.safetensors").write_bytes(bytes(data))


def _other(marks=None, **tensors):
    def damage(folder):
        file = folder / "shard-00002.safetensors"
        held = load_file(file) | tensors
        marked = (
            {"weight": {"saved_offsets": [3, 0]}, "bias": {"saved_offsets": [3]}} if marks is None else marks
        )
        text = marked if isinstance(marked, str) else json.dumps(marked)
        save_file({n: t for n, t in held.items() if t is not None}, file, {"DCP_SHARDING_INFO": text})

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_swap, r"shard-00001\.safetensors is damaged: it holds \(2, 4\) numbers of weight from \[3, 0\]"),
        (_garble, r"shard-00002\.safetensors is damaged"),
        (_other(weight=None), r"shard-00002\.safetensors is damaged: it lacks weight"),
        (_other(weight=torch.zeros(2, 3)), r"holds \(2, 3\) numbers of weight .* says \(2, 4\)"),
        (_other(marks={}), r"numbers of weight from \[0, 0\], and the checkpoint's table says .* \[3, 0\]"),
        (_other(marks="{"), r"shard-00002\.safetensors is damaged: its marks"),
        (_other(marks=[1]), r"shard-00002\.safetensors is damaged: its marks"),
    ],
)
def test_a_file_that_holds_something_else_is_named(checkpoint, damage, said):
    damage(checkpoint / "model")
    _resized(checkpoint)
    source = load_checkpoint(checkpoint).source
    with pytest.raises(ValueError, match=said):
        source.whole("model")


def _pieces(*pieces, shape=(5, 4)):
    return {"tensors": {"weight": {"shape": list(shape), "pieces": list(pieces)}}}


ONE, TWO = "shard-00001.safetensors", "shard-00002.safetensors"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (_pieces([ONE, [0, 0], [3, 4]], [TWO, [2, 0], [3, 4]]), "pieces of weight overlap in its shape"),
        (_pieces([ONE, [0, 0], [3, 4]], [ONE, [0, 0], [3, 4]]), "overlap in its shape"),
        (_pieces([ONE, [0, 0], [3, 4]]), r"pieces of weight do not fill its shape \(5, 4\)"),
        (_pieces([ONE, [0, 0], [3, 4]], [TWO, [4, 0], [2, 4]]), "reach beyond its shape"),
        (_pieces([ONE, [0], [3]], [TWO, [3], [2]]), "another number of dimensions"),
        (_pieces(), "do not fill"),
        (_pieces(["../model.safetensors", [0, 0], [5, 4]]), "is not in the folder"),
        (_pieces(["other.safetensors", [0, 0], [5, 4]]), "no file of this checkpoint"),
        (_pieces([ONE, [0, -1], [3, 4]]), "are not sizes"),
        (_pieces([ONE, [0, 0], [3.0, 4]]), "are not sizes"),
        (_pieces([ONE, [0, 0]]), r"index\.json is damaged"),
        ({"tensors": [1]}, r"index\.json is damaged"),
        ([], r"index\.json is damaged"),
        ("{", r"index\.json is damaged"),
        ("[" * 100_000, r"index\.json is damaged"),
    ],
)
def test_a_table_that_cannot_be_is_refused_before_anything_is_read(checkpoint, table, said):
    text = table if isinstance(table, str) else json.dumps(table)
    (checkpoint / "model" / "index.json").write_text(text)
    _resized(checkpoint)
    with pytest.raises(ValueError, match=said):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {"../outside": 3}}, "not in its folder"),
        ({"files": {"/etc/hostname": 3}}, "not in its folder"),
        ({"files": [3]}, "not a complete checkpoint"),
        ({"divided": 3}, "is damaged"),
        ({"divided": []}, "lists no file of its model"),
        ({"groups": ["model", "optimizer", "observers"]}, "lists no file of its observers"),
    ],
)
def test_a_state_that_names_other_files_is_refused(checkpoint, change, said):
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps({**state, **change}))
    with pytest.raises(ValueError, match=said):
        load_checkpoint(checkpoint)


@st.composite
def grids(draw):
    """A shape, and boxes that fill it: cuts of every dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        bounds = list(zip([0, *cuts], [*cuts, size], strict=True))
        boxes = [Box((*box.offsets, low), (*box.sizes, high - low)) for box in boxes for low, high in bounds]
    return shape, draw(st.permutations(boxes))


@settings(deadline=None, max_examples=60)
@given(grids())
def test_boxes_fill_a_shape_if_each_is_there_once(grid):
    shape, boxes = grid

    def misfit(chosen):
        return _misfit(Entry(shape, tuple((None, box) for box in chosen)))

    assert misfit(boxes) == ""
    assert misfit(boxes[1:]) == "do not fill"
    assert misfit([*boxes, boxes[0]]) == "overlap in"


@settings(deadline=None, max_examples=25)
@given(grids())
def test_any_division_reads_back(tmp_path_factory, grid):
    shape, boxes = grid
    whole = {"x": torch.randn(shape)}
    folder = tmp_path_factory.mktemp("pieces")
    files = _write(folder, whole, {"x": boxes})
    index = index_of_pieces(folder, files)
    assert torch.equal(read_whole(index, "x", "here"), whole["x"])
    into = torch.zeros(shape)
    read_into(index, {"x": into}, "here")
    assert torch.equal(into, whole["x"])
    with pytest.raises(ValueError, match="here has no tensor y"):
        read_whole(index, "y", "here")
