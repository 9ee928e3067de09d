import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.packs.collate import PreferencePairs
from multipack.data.views.documents import IGNORE, Documents


def counted(documents):
    """Targets of each document, counted one by one."""
    return [int((document.shifted_targets() != IGNORE).sum()) for document in documents]


def tokens_of(documents):
    return [document.tokens.tolist() for document in documents]


def test_documents_are_zero_copy_slices(small):
    assert len(small) == 3
    assert tokens_of(small) == [list(range(12)), [12, 13, 14, 15], list(range(16, 24))]
    assert [document.spans.tolist() for document in small] == [[[3, 12]], [[0, 4]], [[1, 3], [4, 8]]]
    assert all(np.shares_memory(small[i].tokens, small[i].tokens) for i in range(3))
    assert small[-1].tokens.tolist() == small[2].tokens.tolist()
    assert small[np.int64(1)].tokens.tolist() == [12, 13, 14, 15]
    for outside in (3, -4):
        with pytest.raises(IndexError, match=f"document {outside} of 3"):
            small[outside]


def test_targets_follow_spans_and_never_the_first_token(small):
    assert small[2].shifted_targets().tolist() == [17, 18, IGNORE, 20, 21, 22, 23, IGNORE]
    assert small[1].shifted_targets().tolist() == [13, 14, 15, IGNORE]
    assert small.target_counts.tolist() == counted(small) == [9, 3, 6]
    whole = Documents.whole(small.store, train_on_prompt=True)
    assert whole.target_counts.tolist() == counted(whole) == [11, 3, 7]


def test_cut_gives_blocks(small):
    pieces = small.cut(5)
    assert pieces.lengths.tolist() == [5, 5, 2, 4, 5, 3]
    assert np.concatenate(tokens_of(pieces)).tolist() == list(range(24))
    assert pieces.target_counts.tolist() == counted(pieces) == [2, 4, 1, 3, 3, 2]
    assert pieces.name(1) == "doc0 [tokens 5 to 10 of 12]"
    assert pieces.name(3) == "doc1"
    assert tokens_of(pickle.loads(pickle.dumps(pieces))) == tokens_of(pieces)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_view_counts_its_targets_right(memory_store, data):
    part = st.tuples(st.integers(0, 6), st.booleans())
    shapes = data.draw(st.lists(st.lists(part, min_size=1, max_size=4), min_size=1, max_size=6))
    encoded = [
        [([7], False), *(([number] * length, on) for length, on in parts)]
        for number, parts in enumerate(shapes)
    ]
    documents = Documents.whole(memory_store(encoded), data.draw(st.booleans()))
    for view in (documents, documents.cut(data.draw(st.integers(1, 9)))):
        assert view.target_counts.tolist() == counted(view)
        assert view.num_tokens == sum(len(document.tokens) for document in view) == documents.num_tokens
        limit = data.draw(st.integers(1, 9))
        for policy in ("truncate", "split"):
            fitted, report = view.fit(limit, policy)
            assert fitted.lengths.max() <= limit
            assert fitted.target_counts.tolist() == counted(fitted)
            assert fitted.num_tokens + (policy == "truncate") * report.tokens == view.num_tokens
            assert report.without_targets == counted(fitted).count(0)


def test_take_keeps_the_order_given(small):
    assert tokens_of(small.take([2, 0])) == [tokens_of(small)[2], tokens_of(small)[0]]
    assert small.take([]).target_counts.tolist() == []
    with pytest.raises(IndexError):
        small.take([3])


def test_split_is_by_document_seeded_and_exact(write_store):
    documents = Documents.whole(write_store([[(number % 7 + 1, True)] for number in range(103)]))
    train, validation = documents.hold_out(0.1, seed=3)
    assert (len(train), len(validation)) == (93, 10)
    names = [view.name(index) for view in (train, validation) for index in range(len(view))]
    assert sorted(names) == sorted(f"doc{number}" for number in range(103))
    kept = [int(train.name(index)[3:]) for index in range(len(train))]
    assert kept == sorted(kept)
    assert tokens_of(documents.hold_out(0.1, seed=3)[1]) == tokens_of(validation)
    assert tokens_of(documents.hold_out(0.1, seed=4)[1]) != tokens_of(validation)
    assert len(documents.hold_out(0.0)[1]) == 0
    assert len(documents.hold_out(0.001)[1]) == 1
    assert len(documents.hold_out(0.999)[0]) == 1


def test_the_end_is_held_out_where_it_must_be_cut(small):
    train, validation = small.hold_out_end(0.5)
    assert (train.num_tokens, validation.num_tokens) == (12, 12)
    train, validation = small.hold_out_end(0.4)  # 24 · 0.6 = 14.4
    assert tokens_of(train) == [list(range(12)), [12, 13]]
    assert tokens_of(validation) == [[14, 15], list(range(16, 24))]
    assert validation.target_counts.tolist() == counted(validation) == [1, 6]
    assert len(small.hold_out_end(0.0)[1]) == 0


def test_impossible_splits_are_refused(small):
    with pytest.raises(ValueError, match=r"data\.validation=0\.5: 1 document .* cannot be split"):
        small.take([0]).hold_out(0.5)
    with pytest.raises(ValueError, match=r"data\.validation=0\.5 .* each needs 2"):
        small.cut(1).take([0]).hold_out_end(0.5)


def test_the_fingerprint_knows_what_is_trained_on(small, write_store):
    same = Documents.whole(small.store)
    assert small.fingerprint == same.fingerprint == small.take([0, 1, 2]).fingerprint
    others = [
        small.take([1, 0, 2]),
        small.cut(8),
        Documents.whole(small.store, train_on_prompt=True),
        Documents.whole(write_store([[(12, True)], [(4, True)], [(8, True)]], "other.store")),
    ]
    assert len({small.fingerprint, *(other.fingerprint for other in others)}) == 5


@pytest.fixture
def pairs(write_pairs):
    """Two preference pairs: a prompt of 2, answers of 3 and 4; a prompt of 1, answers of 2 and 6."""
    return Documents.whole(write_pairs([(2, 3, 4), (1, 2, 6)]))


def test_pairs_are_one_item_of_two_documents(pairs, small):
    assert (len(pairs), pairs.lengths.tolist(), pairs.target_counts.tolist()) == (2, [11, 10], [7, 8])
    chosen, rejected = pairs.members(0)
    assert (chosen.tokens.tolist(), rejected.tokens.tolist()) == (list(range(5)), list(range(6)))
    assert (chosen.spans.tolist(), rejected.spans.tolist()) == ([[2, 5]], [[2, 6]])
    everything = Documents.whole(pairs.store, train_on_prompt=True)
    assert everything.target_counts.tolist() == [9, 8]
    assert [counted(everything.members(index)) for index in range(2)] == [[4, 5], [2, 6]]
    assert pairs.take([1]).members(0)[0].tokens.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="is a preference pair"):
        pairs[0]
    assert small.members(0)[0].tokens.tolist() == small[0].tokens.tolist()
    with pytest.raises(ValueError, match=r"holds no pairs.*data\.format=preference"):
        PreferencePairs(small)


def test_pairs_are_never_cut(pairs):
    for policy in ("truncate", "truncate_left", "split"):
        with pytest.raises(ValueError, match=r"data\.overlong=drop \(a preference pair is not shortened"):
            pairs.fit(10, policy)
        assert pairs.fit(11, policy)[0].fingerprint == pairs.fingerprint
    with pytest.raises(ValueError, match=r"data\.overlong=drop \(a preference pair"):
        pairs.fit(10)
    kept, report = pairs.fit(10, "drop")
    assert (len(kept), report.documents) == (1, 1)
    with pytest.raises(ValueError, match="is a preference pair, and a pair cannot be cut"):
        pairs.cut(4)


def test_prompts_are_measured(small):
    assert [small.prompt_length(index) for index in range(3)] == [3, 0, 1]
    assert [small.cut(2).prompt_length(index) for index in range(3)] == [2, 0, 0]
