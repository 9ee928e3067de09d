"""Folders of shards that grow while they are read: complete, growing, waiting, going on, holding back."""

import itertools
import json
import threading
import time

import numpy as np
import pytest

from multipack.data.arriving import HEAD, StreamInterrupted
from multipack.data.growing import OPEN_SHARDS, GrowingFolder
from multipack.data.tokenizer import byte_tokenizer
from multipack.data.writer import StoreWriter

LENGTHS = np.random.default_rng(3).integers(2, 40, 60)


def write_shard(path, number, lengths, tokenizer=None, **options):
    """Write the next shard of a store that grows."""
    writer = StoreWriter(path, tokenizer or byte_tokenizer(), **options).__enter__()
    for document, length in enumerate(lengths):
        tokens = [(60 * number + document + i) % 3 for i in range(length)]
        writer.add(f"doc{number}.{document}", [(tokens[:1], False), (tokens[1:], True)])
    writer.end_shard()


def complete(path):
    with StoreWriter(path, byte_tokenizer()):
        pass


@pytest.fixture
def folder(tmp_path):
    """Three complete shards of 20 documents."""
    path = tmp_path / "shards"
    path.mkdir()
    for number in range(3):
        write_shard(path, number, LENGTHS[20 * number : 20 * number + 20])
    complete(path)
    return path


@pytest.fixture
def stream(config):
    def make(path, limit=64, **fields):
        data = config(
            source="store",
            path=str(path),
            stream=True,
            **{"validation": 0.0, "patience_seconds": 2.0} | fields,
        )
        return GrowingFolder(data, limit)

    return make


def shown(arriving, items):
    return [
        (
            arriving.document_name(item),
            *(part.tolist() for part in (arriving.document(item).tokens, arriving.document(item).spans)),
        )
        for item in items
    ]


def test_all_documents_arrive_in_order(folder, stream):
    arriving = stream(folder)
    items = list(arriving)
    assert [item["length"] for item in items] == LENGTHS.tolist()
    assert [item["targets"] for item in items] == (LENGTHS - 1).tolist()
    assert [arriving.document_name(item) for item in items][20] == "shard 1: doc1.0"
    documents = [arriving.document(item) for item in items]
    assert [len(document.tokens) for document in documents] == LENGTHS.tolist()
    assert list(arriving) == []  # it stands at the end
    arriving.restart()
    assert list(arriving) == items


def test_a_growing_folder_gives_what_a_complete_one_gives(folder, stream, tmp_path):
    path = tmp_path / "growing"

    def grow():
        for number in range(3):
            time.sleep(0.05)
            write_shard(path, number, LENGTHS[20 * number : 20 * number + 20])
        time.sleep(0.05)
        complete(path)

    thread = threading.Thread(target=grow)
    thread.start()
    growing = stream(path)  # while there is not even a folder
    items = list(growing)
    thread.join()
    assert shown(growing, items) == shown(stream(folder), list(stream(folder)))


@pytest.mark.parametrize("stop", [0, 1, 19, 20, 21, 59, 60])
def test_reading_goes_on_where_it_stopped(folder, stream, stop):
    whole = list(stream(folder, overlong="split", overlap=2, limit=16))
    first = stream(folder, overlong="split", overlap=2, limit=16)
    head = list(itertools.islice(first, stop))
    second = stream(folder, overlong="split", overlap=2, limit=16)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = list(second)
    assert head + rest == whole
    assert shown(second, head) == shown(first, head)  # items that were in flight are read again
    list(first)
    assert first.report == second.report
    assert second.report.split_documents == int((LENGTHS > 16).sum())


def test_more_shards_than_are_kept_open(tmp_path, stream):
    path = tmp_path / "many"
    for number in range(OPEN_SHARDS + 4):
        write_shard(path, number, [5, 6])
    complete(path)
    arriving = stream(path)
    items = list(arriving)
    assert [name for name, *_ in shown(arriving, items)] == [
        f"shard {number}: doc{number}.{document}"
        for number in range(OPEN_SHARDS + 4)
        for document in range(2)
    ]
    assert len(arriving._open) == OPEN_SHARDS


def test_some_of_the_first_documents_are_held_back(folder, stream):
    arriving = stream(folder, validation=0.2)
    held = [arriving.validation.names(number) for number in range(len(arriving.validation))]
    assert len(held) == 4  # of the 20 of the first shard
    trained = [name.split(": ")[1] for name, *_ in shown(arriving, list(arriving))]
    assert not set(held) & set(trained)
    assert len(trained) == 56
    assert [stream(folder, validation=0.2).validation.names(number) for number in range(4)] == held
    other = stream(folder, validation=0.2, split_seed=1).validation
    assert [other.names(number) for number in range(4)] != held


def test_only_the_head_of_a_large_shard_is_held_back(tmp_path, stream):
    path = tmp_path / "large"
    write_shard(path, 0, [3] * (HEAD + 1000))
    complete(path)
    arriving = stream(path, validation=0.5)
    assert len(arriving.validation) == HEAD // 2
    assert int(arriving.validation.pieces.document.max()) < HEAD


def test_what_never_comes_is_named(folder, stream, tmp_path):
    with pytest.raises(ValueError, match=r"waited 0\.2 s for .*shard 0 of .*nothing \(0 shards are there"):
        stream(tmp_path / "nothing", patience_seconds=0.2)
    (folder / "header.json").unlink()
    arriving = stream(folder, patience_seconds=0.2)
    items = iter(arriving)
    assert len(list(itertools.islice(items, 60))) == 60
    with pytest.raises(ValueError, match=r"shard 3 of .* \(3 shards are there, and no header\.json"):
        next(items)
    complete(folder)
    assert list(arriving) == []  # waiting again finds that it is complete; nothing was lost


def test_waiting_can_be_ended(folder, stream):
    (folder / "header.json").unlink()
    arriving = stream(folder, patience_seconds=60.0)
    threading.Timer(0.1, arriving.interrupt).start()
    seen = []
    with pytest.raises(StreamInterrupted):
        seen.extend(arriving)
    assert arriving.state_dict()["chunk"] == 3


def test_a_stream_of_text_is_refused(tmp_path, stream):
    write_shard(tmp_path / "stretch", 0, [50], split_by="position")
    with pytest.raises(ValueError, match="one stream of text"):
        stream(tmp_path / "stretch")


def test_settings_that_cannot_be_are_refused(folder, stream, tmp_path):
    with pytest.raises(
        ValueError, match=r"document \d+ \(doc0\.\d+\) has \d+ tokens, more than the limit of 8"
    ):
        list(stream(folder, limit=8))
    one = tmp_path / "one"
    write_shard(one, 0, [5])
    with pytest.raises(ValueError, match=r"data\.validation=0\.5 holds documents back.*begins with 1"):
        stream(one, validation=0.5)


def test_a_place_in_another_stream_is_refused(folder, stream, tmp_path):
    state = stream(folder).state_dict()
    with pytest.raises(ValueError, match="in another stream"):
        stream(folder, validation=0.2).load_state_dict(state)
    with pytest.raises(ValueError, match="in another stream"):
        stream(folder, limit=50).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks number"):
        stream(folder).load_state_dict({key: value for key, value in state.items() if key != "number"})
