"""Several stores as one: every document, target and name of them, in order; and what cannot be joined."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.corpus import load_corpus
from multipack.data.documents import Documents
from multipack.data.fit import Fit
from multipack.data.joint import JointStore, open_store, spans_of_each
from multipack.data.lengths import LengthsConfig, read_lengths
from multipack.data.shards import ShardsHeader, shard_name
from multipack.data.store import TokenStore
from multipack.data.tokenizer import TokenizerConfig, byte_tokenizer, character_tokenizer
from multipack.data.writer import StoreWriter

SHAPES = [
    [(3, False), (9, True)],
    [(4, True)],
    [(1, False), (2, True), (1, False), (4, True)],
    [(5, False)],
    [(7, True)],
]


@pytest.fixture
def folder(write_store, tmp_path):
    """Three shards of SHAPES, growing; and the function that completes them."""
    for number, documents in enumerate((SHAPES[:2], SHAPES[2:3], SHAPES[3:])):
        write_store(documents, f"shards/{shard_name(number)}")
    path = tmp_path / "shards"
    stores = [TokenStore(path / shard_name(number)) for number in range(3)]

    def complete():
        ShardsHeader(
            [{"name": store.path.name, "checksum": store.checksum} for store in stores],
            documents=5,
            tokens=36,
            source_hash="whole",
            tokenizer_hash=stores[0].header.tokenizer_hash,
            description="all of it",
            skipped={"blank lines": 2},
        ).write(path)
        return path

    return path, complete


def described(documents):
    return [(each.tokens.tolist(), each.spans.tolist()) for each in documents]


def test_a_folder_of_shards_is_one_store(folder):
    path, complete = folder
    with pytest.raises(ValueError, match=r"still grows: 3 are there.*data\.stream=true"):
        open_store(path)
    store = open_store(complete())
    whole = Documents.whole(store)
    parts = [Documents.whole(TokenStore(path / shard_name(number))) for number in range(3)]
    assert described(whole) == [each for part in parts for each in described(part)]
    assert whole.target_counts.tolist() == [count for part in parts for count in part.target_counts]
    assert store.target_counts.tolist() == whole.target_counts.tolist()
    assert whole.lengths.tolist() == [12, 4, 8, 5, 7]
    assert [whole.names(number) for number in range(5)] == ["doc0", "doc1", "doc0", "doc0", "doc1"]
    assert (store.num_documents, store.num_tokens, store.header.description) == (5, 36, "all of it")
    assert store.header.source_hash == "whole"
    assert store.header.skipped == {"blank lines": 2}
    assert whole[2].tokens.base is not None  # still a slice of a memory map
    assert described(pickle.loads(pickle.dumps(whole))) == described(whole)
    store.verify()


def test_load_corpus_and_lengths_take_a_folder_of_shards(folder, config):
    path = folder[1]()
    corpus = load_corpus(
        config(source="store", path=str(path), validation=0.4, overlong="split"), TokenizerConfig(), limit=6
    )
    assert len(corpus.validation) >= 2
    assert corpus.train.num_tokens + corpus.validation.num_tokens == 36
    assert corpus.corpus_hash == "whole"
    assert corpus.store_path == path
    found = read_lengths(path, 16)
    assert (found.lengths.tolist(), found.targets.tolist()) == ([12, 4, 8, 5, 7], [9, 3, 6, 0, 6])


def test_the_order_of_stores_is_part_of_the_checksum(folder):
    path, _ = folder
    stores = [TokenStore(path / shard_name(number)) for number in range(3)]
    joint = [JointStore(path, each).checksum for each in (stores, stores[::-1], stores[:2])]
    assert len({*joint, *(store.checksum for store in stores)}) == 6


def test_a_damaged_shard_is_found(folder):
    path = folder[1]()
    file = path / shard_name(1) / "tokens.bin"
    file.write_bytes(bytes(len(file.read_bytes())))
    store = open_store(path)
    with pytest.raises(ValueError, match=r"tokens\.bin was edited"):
        store.verify()


def test_stores_of_two_tokenizers_are_refused_by_name(tmp_path, write_store):
    one = write_store([[(4, True)]], "bytes.store")
    with StoreWriter(tmp_path / "letters.store", character_tokenizer(iter("abc")), source_hash="s") as writer:
        writer.add("a", [([0, 1], True)])
    other = TokenStore(tmp_path / "letters.store")
    with pytest.raises(
        ValueError, match=r"bytes\.store was tokenized with byte .*letters\.store was tokenized with char"
    ):
        JointStore(tmp_path, [one, other])
    with pytest.raises(ValueError, match="holds no token store"):
        JointStore(tmp_path, [])


def test_names_get_labels(write_store, tmp_path):
    stores = [write_store([[(2, True)]], name) for name in ("a", "b")]
    joint = JointStore(tmp_path, stores, ["code", "prose"])
    assert [joint.name(number) for number in range(2)] == ["code: doc0", "prose: doc0"]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_documents_of_any_stores_have_their_ranges(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("joint")
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    part, stores = st.tuples(st.integers(1, 4), st.booleans()), []
    for number, size in enumerate(sizes):
        with StoreWriter(folder / str(number), byte_tokenizer(), source_hash="s") as writer:
            for document in range(size):
                parts = data.draw(st.lists(part, min_size=1, max_size=4))
                writer.add(str(document), [([number] * length, on) for length, on in parts])
        stores.append(TokenStore(folder / str(number)))
    joint = JointStore(folder, [JointStore(folder, stores[:1]), *stores[1:]])  # one inside another
    numbers = np.array(data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=8)), dtype=np.int64)
    counts, spans = spans_of_each(joint, numbers)
    expected = [joint.spans_of(number) for number in numbers.tolist()]
    assert counts.tolist() == [len(each) for each in expected]
    assert spans.tolist() == [row for each in expected for row in each.tolist()]
    view = Documents.whole(joint).take(numbers)
    assert view.target_counts.tolist() == [int((each.shifted_targets() >= 0).sum()) for each in view]


def test_lengths_of_documents_that_are_too_long_are_those_of_training(write_store):
    store = write_store([[(3, False), (9, True)], [(4, True)]])
    with pytest.raises(ValueError, match=r"more than the limit of 8 .*data\.overlong=truncate"):
        read_lengths(store.path, 8)
    data = LengthsConfig("split", overlap=1, repeat_prompt=True)
    found = read_lengths(store.path, 8, data=data)
    documents, report = Documents.whole(store).fit(8, Fit("split", 1, True))
    assert found.lengths.tolist() == documents.lengths.tolist() == [8, 8, 4]
    assert (found.targets.tolist(), found.fit) == (documents.target_counts.tolist(), report)
