import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.batches import KeptDocuments, batches
from multipack.data.blocks import TokenBlock, documents_from_bytes, documents_to_bytes, encode
from multipack.data.source_document import Part, SourceDocument
from multipack.data.tokenizer import byte_tokenizer

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def _document(draw, number):
    def part():
        return Part(draw(texts), draw(st.booleans()))

    first = [part() for _ in range(draw(st.integers(1, 3)))]
    second = [part() for _ in range(draw(st.integers(0, 2)))]
    name = draw(st.sampled_from(["a", "é", ""])) + str(number)
    return SourceDocument(
        name, (*first, *second), draw(st.booleans()), draw(st.booleans()), len(first) if second else 0
    )


@st.composite
def documents(draw):
    return [_document(draw, number) for number in range(draw(st.integers(0, 5)))]


class ListSource:
    """Documents of a list."""

    done, is_stream = 0, False

    def __init__(self, items):
        self.items, self.skipped = items, {}

    def __iter__(self):
        self.skipped = {"blank lines": 2}
        return iter(self.items)

    def describe(self, documents):
        return f"{documents} of a list"


def reference(document, end):
    """Tokens, targets and border of a document, letter by letter; None = it is left out."""
    split = document.border or len(document.parts)
    halves = [half for half in (document.parts[:split], document.parts[split:]) if half]
    tokens, targets, borders = [], [], []
    for half in halves:
        borders.append(len(tokens))
        if not any(part.text for part in half):
            return None
        for part in half:
            raw = list(part.text.encode())
            tokens += raw
            targets += [part.is_target] * len(raw)
        if document.ended and not document.closed:
            tokens.append(end)
            targets.append(True)
    return tokens, targets, borders[1] if len(halves) == 2 else 0


@settings(deadline=None, max_examples=150)
@given(documents())
def test_blocks_hold_what_documents_say(given_documents):
    tokenizer = byte_tokenizer()
    travelled = documents_from_bytes(documents_to_bytes(given_documents))
    assert travelled == given_documents
    block = TokenBlock.from_bytes(encode(travelled, tokenizer).to_bytes())
    expected = [found for one in given_documents if (found := reference(one, tokenizer.end_id)) is not None]
    assert block.tokens.tolist() == [token for tokens, _, _ in expected for token in tokens]
    assert block.lengths.tolist() == [len(tokens) for tokens, _, _ in expected]
    assert block.borders.tolist() == [border for _, _, border in expected]
    assert block.num_left_out == len(given_documents) - len(expected)
    assert block.documents_read == len(given_documents)
    spans = iter(block.spans.tolist())
    for (tokens, targets, border), count in zip(expected, block.span_counts, strict=True):
        found = np.zeros(len(tokens), dtype=bool)
        for start, stop in [next(spans) for _ in range(count)]:
            assert not found[start:stop].any()
            assert not start < border < stop
            found[start:stop] = True
        assert found.tolist() == targets


@settings(deadline=None, max_examples=50)
@given(documents(), st.integers(1, 5))
def test_joined_blocks_are_the_block_of_all(given_documents, size):
    tokenizer = byte_tokenizer()
    parts = [given_documents[at : at + size] for at in range(0, len(given_documents), size)] or [[]]
    joined = TokenBlock.joined([encode(part, tokenizer) for part in parts])
    assert joined.to_bytes() == encode(given_documents, tokenizer).to_bytes()


def test_damaged_blocks_are_refused():
    content = encode([SourceDocument("a", (Part("abc", True),))], byte_tokenizer()).to_bytes()
    for damaged in (b"", content[:-1], content[:40], b"\0" * 80):
        with pytest.raises(ValueError, match="not a block of tokens"):
            TokenBlock.from_bytes(damaged)
    changed = TokenBlock.from_bytes(content)
    changed.lengths[0] = 3
    with pytest.raises(ValueError, match="contradicts itself"):
        TokenBlock.from_bytes(changed.to_bytes())


# --- duplicates ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.lists(documents(), min_size=1, max_size=3))
def test_the_first_of_duplicates_stays(lists):
    items = [document for part in lists for document in (*part, *part)]
    kept = KeptDocuments(ListSource(items), dedup=True)
    expected, seen = [], set()
    for one in items:
        what = (one.parts, one.ended, one.closed, one.border)
        if what not in seen:
            expected.append(one)
            seen.add(what)
    assert list(kept) == expected
    left_out = len(items) - len(expected)
    assert kept.skipped == {"blank lines": 2, **({"duplicates": left_out} if left_out else {})}
    everything = KeptDocuments(ListSource(items), dedup=False)
    assert list(everything) == items
    assert "duplicates" not in everything.skipped


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Part("ab", True),), (Part("a", True), Part("b", True))),
        ((Part("ab", True),), (Part("ab", False),)),
        ((Part("<e>", True),), (Part("<e>", True, True),)),
        ((Part("a\0", True), Part("b", True)), (Part("a", True), Part("\0b", True))),
    ],
)
def test_documents_that_train_otherwise_are_no_duplicates(first, second):
    items = [SourceDocument("a", first), SourceDocument("b", second), SourceDocument("c", first)]
    assert [one.name for one in KeptDocuments(ListSource(items), dedup=True)] == ["a", "b"]


def test_a_stream_has_no_duplicates():
    source = ListSource([])
    source.is_stream = True
    with pytest.raises(ValueError, match=r"data\.dedup=true leaves out documents, and a stream is one"):
        KeptDocuments(source, dedup=True)


def test_batches_are_bounded(monkeypatch):
    monkeypatch.setattr("multipack.data.batches.BATCH_CHARACTERS", 10)
    monkeypatch.setattr("multipack.data.batches.BATCH_DOCUMENTS", 3)
    items = [SourceDocument(str(n), (Part("x" * n, True),)) for n in (1, 1, 1, 1, 30, 2)]
    made = list(batches(items, lambda: 7))
    assert [[len(one.parts[0].text) for one in batch.documents] for batch in made] == [
        [1, 1, 1],
        [1, 30],
        [2],
    ]
    assert [batch.characters for batch in made] == [3, 31, 2]
    assert {batch.done for batch in made} == {7}
