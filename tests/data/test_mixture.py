"""Mixtures: exact shares of documents and of tokens, nothing lost, nothing counted wrongly, validation untouched."""

import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.stores.store import TokenStore
from multipack.data.stores.writer import StoreWriter
from multipack.data.text.tokenizer import TokenizerConfig, byte_tokenizer
from multipack.data.views.corpus import load_corpus
from multipack.data.views.documents import Documents
from multipack.data.views.mixture import mix


@pytest.fixture(scope="session")
def joint_of(memory_store):
    """Makes a joint store of lists of lengths, and returns a view of each of its stores."""

    def make(*sources):
        stores = [memory_store([[([7] * length, True)] for length in lengths]) for lengths in sources]
        joint = TokenStore.joined(stores[0].path, stores, [f"s{number}" for number in range(len(stores))])
        return [
            Documents.whole(store).within(joint, int(at))
            for store, at in zip(stores, joint.first, strict=False)
        ]

    return make


def counts_of(view, sources):
    """How often each document of each source is seen."""
    seen = Counter(view.pieces["document"].tolist())
    first = sources[0].store.first
    return [[seen[int(first[i]) + n] for n in range(len(source))] for i, source in enumerate(sources)]


def test_documents_in_exact_shares(joint_of):
    sources = joint_of([3] * 10, [3] * 4)
    view, (a, b) = mix(sources, ["a", "b"], [0.3, 0.1])
    assert (a.documents, b.documents) == (12, 4)  # three to one, all of a and of b
    assert (a.actual, a.requested) == (0.75, 0.75)
    counts = counts_of(view, sources)
    assert sorted(counts[0]) == [1] * 8 + [2] * 2
    assert counts[1] == [1] * 4
    assert (
        "12 documents, 36 tokens: 75.00% of the mixture (requested 75.00%), 1.20 times its 10" in a.describe()
    )
    owners = [0 if number < 10 else 1 for number in view.pieces["document"]]
    assert [sum(owners[:at]) for at in (4, 8, 12, 16)] == [1, 2, 3, 4]  # evenly interleaved


def test_impossible_mixtures_are_refused(joint_of):
    sources = joint_of([1] * 1000, [1])
    with pytest.raises(ValueError, match=r"s1 is seen 9,999,000,000 times"):
        mix(sources, ["s0", "s1"], [1e-7, 1 - 1e-4])


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_mixture_is_exact(joint_of, data):
    lengths = st.lists(st.integers(1, 12), min_size=1, max_size=9)
    sources = joint_of(*data.draw(st.lists(lengths, min_size=2, max_size=4)))
    weights = data.draw(
        st.lists(st.sampled_from([0.1, 0.25, 0.3, 1, 2.5, 7]), min_size=len(sources), max_size=len(sources))
    )
    seed, names = data.draw(st.integers(0, 3)), [str(number) for number in range(len(sources))]
    view, shares = mix(sources, names, weights, seed)
    exact = [Fraction(str(weight)) for weight in weights]
    asked = [weight / sum(exact) for weight in exact]
    counts = counts_of(view, sources)
    total = max(source.num_tokens / p for source, p in zip(sources, asked, strict=True))
    for share, source, seen, p in zip(shares, sources, counts, asked, strict=True):
        assert max(seen) - min(seen) <= 1  # as even as can be
        assert min(seen) >= 1
        assert share.documents == sum(seen)
        assert share.tokens == sum(
            n * length for n, length in zip(seen, source.lengths.tolist(), strict=True)
        )
        assert 0 <= share.tokens - total * p < source.lengths.max()
    assert float(sum(share.actual for share in shares)) == pytest.approx(1)
    # The source that decides how long the epoch is, is seen whole, once.
    decisive = [source.num_tokens / p for source, p in zip(sources, asked, strict=True)]
    place = decisive.index(max(decisive))
    assert counts[place] == [1] * len(sources[place])
    again, _ = mix(sources, names, weights, seed)
    assert again.fingerprint == view.fingerprint


@pytest.fixture
def stores(tmp_path):
    """Two stores: 40 documents of 1 to 40 tokens, 10 of 30."""
    for name, lengths in (("small", range(1, 41)), ("large", [30] * 10)):
        with StoreWriter(tmp_path / name, byte_tokenizer()) as writer:
            for number, length in enumerate(lengths):
                writer.add(f"doc{number}", [([7] * length, True)])
    return [str(tmp_path / "small"), str(tmp_path / "large")]


def test_a_mixture_is_loaded_split_and_fitted_by_source(stores, config):
    common = {"validation": 0.2, "overlong": "split"}
    data = config(source="mixture", paths=stores, weights=[0.5, 0.5], **common)
    corpus = load_corpus(data, TokenizerConfig(), limit=16)
    small, large = corpus.mixture
    assert (small.name, large.name) == ("small", "large")
    assert abs(small.tokens - large.tokens) < 16  # each ends with a whole document
    assert corpus.train_fit.documents > 0
    sources = [config(source="store", path=path, **common) for path in stores]
    own = [load_corpus(source, TokenizerConfig(), limit=16) for source in sources]
    assert len(corpus.validation) == sum(len(each.validation) for each in own)
    names = [corpus.validation.name(number) for number in range(len(corpus.validation))]
    assert names[0] == f"small: {own[0].validation.name(0)}"
    assert names[-1] == f"large: {own[1].validation.name(len(own[1].validation) - 1)}"
    held = {name.split(" [")[0] for name in names}
    trained = {corpus.train.name(number).split(" [")[0] for number in range(len(corpus.train))}
    assert not held & trained
    assert len(held | trained) == 50
    assert re.fullmatch(r"mixture by tokens: small [45]\d\.\d%, large [45]\d\.\d%", corpus.description)
