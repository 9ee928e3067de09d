from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.views.documents import IGNORE, Documents


@pytest.fixture
def documents(write_store):
    """Lengths 12 (after a prompt of 9), 4 and 9."""
    return Documents.whole(write_store([[(9, False), (3, True)], [(4, True)], [(9, True)]]))


def test_what_fits_is_left_alone(documents):
    for policy in ("error", "truncate", "split", "drop"):
        fitted, report = documents.fit(12, policy)
        assert fitted.fingerprint == documents.fingerprint
        assert report.describe() == ""
    fitted, report = documents.fit(8, "split")
    assert "2 documents longer than 8 tokens split into 4 pieces" in report.describe()
    assert documents.take([]).fit(8)[1].without_targets == 0
    assert report.without_targets == 2  # the piece that is all prompt, and the piece of one token


@pytest.mark.parametrize(
    ("limit", "fit", "complaint"),
    [
        (8, "error", r"0 \(doc0\) has 12 tokens.*2 of 3 documents.*data\.overlong=truncate, split or drop"),
        (8, "shorten", "one of error, truncate, truncate_left, split, drop"),
        (0, "split", "pieces of 0"),
        (8, {"repeat_prompt": True}, r"doc0 has a prompt of 9 tokens.*pieces of 8"),
        (8, {"overlap": 8}, r"data\.overlap=8: pieces of 8 tokens"),
        (8, {"overlap": -1}, r"data\.overlap=-1"),
    ],
)
def test_impossible_requests_are_refused(documents, limit, fit, complaint):
    with pytest.raises(ValueError, match=complaint):
        documents.fit(limit, **({"policy": "split"} | fit if isinstance(fit, dict) else {"policy": fit}))


def test_policies_shorten_and_report(documents):
    longer = "2 documents longer than 8 tokens"
    for policy, first, lengths, expected, line in (
        (
            "truncate",
            0,
            [8, 4, 8],
            [2, 2, 5, 1, 2],
            f"{longer} truncated (5 tokens; targets cut off in 2); 1 document without",
        ),
        (
            "truncate_left",
            4,
            [8, 4, 8],
            [2, 2, 5, 0, 1],
            f"{longer} truncated at their beginning (5 tokens; targets",
        ),
        ("drop", 12, [4], [2, 0, 21, 0, 0], f"{longer} dropped (21 tokens)"),
    ):
        fitted, report = documents.fit(8, policy)
        assert (fitted[0].tokens[0], fitted.lengths.tolist()) == (first, lengths)
        assert list(astuple(report)[2:]) == expected
        assert report.describe().startswith(line)
    assert documents.fit(8, "truncate_left")[0].name(0) == "doc0 [tokens 4 to 12 of 12]"


def test_pieces_begin_with_the_prompt(write_store):
    documents = Documents.whole(write_store([[(3, False), (9, True)], [(4, True)]]))
    fitted, report = documents.fit(6, "split", overlap=1, repeat_prompt=True)
    assert fitted[1].tokens.tolist() == [0, 1, 2, 5, 6, 7]
    assert fitted[1].spans.tolist() == [[4, 6]]
    assert fitted.name(1) == "doc0 [prompt and tokens 5 to 8 of 12]"
    assert [fitted.prompt_length(index) for index in range(5)] == [3, 3, 3, 3, 0]
    assert report.tokens == 3 * 4
    for again in (fitted.cut, fitted.fit):
        with pytest.raises(ValueError, match=r"cannot be cut again|more than the limit"):
            again(4)
    assert [len(view) for view in fitted.hold_out(0.5)] == [1, 4]  # the pieces of a document stay together
    assert len({fitted.fingerprint, documents.fit(6, "split")[0].fingerprint, documents.fingerprint}) == 3


def pieces_of(document, limit, overlap, prompt):
    """Splitting in plain Python: lists of (token, whether it may be a target)."""
    if len(document) <= limit:
        return [document]
    made, at = [document[:limit]], limit
    while at < len(document):
        front = [(token, False) for token, _ in [*document[:prompt], *document[at - overlap : at]]]
        new = document[at : at + limit - len(front)]
        made.append(front + new)
        at += len(new)
    return made


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_any_split_trains_every_target_once(memory_store, data):
    part = st.tuples(st.integers(0, 7), st.booleans())
    shapes = data.draw(st.lists(st.lists(part, min_size=1, max_size=4), min_size=1, max_size=5))
    encoded, documents = [], []
    for number, parts in enumerate(shapes):
        made, document = [], []
        for length, on in [(1, False), *parts]:
            tokens = [(17 * number + len(document) + i) % 256 for i in range(length)]
            made.append((tokens, on))
            document += [(token, on) for token in tokens]
        encoded.append(made)
        documents.append(document)
    limit = data.draw(st.integers(2, 12))
    overlap, repeat_prompt = data.draw(st.integers(0, limit - 1)), data.draw(st.booleans())
    on_prompt = data.draw(st.booleans())
    prompts = [next((i for i, (_, on) in enumerate(document) if on), 0) for document in documents]
    view = Documents.whole(memory_store(encoded), train_on_prompt=on_prompt)
    fit = ("split", overlap, repeat_prompt)
    long = [len(document) > limit for document in documents]
    if repeat_prompt and any(
        is_long and prompt + overlap >= limit for is_long, prompt in zip(long, prompts, strict=True)
    ):
        with pytest.raises(ValueError, match="leaves no room for new tokens"):
            view.fit(limit, *fit)
        return
    fitted, report = view.fit(limit, *fit)
    if on_prompt:
        documents = [[(token, True) for token, _ in document] for document in documents]
    expected = []
    for document, prompt in zip(documents, prompts, strict=True):
        expected.append(pieces_of(document, limit, overlap, prompt if repeat_prompt else 0))
    flat = [piece for pieces in expected for piece in pieces]
    assert [document.tokens.tolist() for document in fitted] == [
        [token for token, _ in piece] for piece in flat
    ]
    for document, piece in zip(fitted, flat, strict=True):
        wanted = [token if on else IGNORE for token, on in piece[1:]] + [IGNORE]
        assert document.shifted_targets().tolist() == wanted
    assert fitted.target_counts.tolist() == [sum(on for _, on in piece[1:]) for piece in flat]
    assert (report.documents, report.pieces) == (
        sum(long),
        sum(len(pieces) for pieces, is_long in zip(expected, long, strict=True) if is_long),
    )
    assert report.tokens == sum(map(len, flat)) - sum(map(len, documents))
    if overlap:  # every target but a first token is a target exactly once
        assert fitted.target_counts.sum() == view.target_counts.sum()
    chosen = data.draw(st.lists(st.integers(0, len(fitted) - 1), max_size=4))
    some = fitted.take(chosen)
    assert some.target_counts.tolist() == fitted.target_counts[chosen].tolist()
    assert some.num_tokens == sum(len(flat[number]) for number in chosen)
