"""Streaming text equals all tokens decoded at once."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.text.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from multipack.models.sampling import TextStream

BYTES = byte_tokenizer()
BPE = train_bpe(iter(["the cat sat on the mat, naïve café 日本語 " * 20]), 300)


def stream(tokenizer, ids, stop=(), prompt=()):
    text = TextStream(tokenizer, prompt, stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pieces.append(text.finish())
    assert "".join(pieces) == text.text
    return text, pieces


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first, letter by letter."""
    for end in range(len(text) + 1):
        if met := [each for each in stop if text[:end].endswith(each)]:
            return text[: end - max(map(len, met))]
    return text


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 256), max_size=40), st.text("aé日😀 ", max_size=6))
def test_pieces_join_to_the_whole_text_for_any_bytes(ids, prompt):
    text, pieces = stream(BYTES, ids, prompt=BYTES.encode(prompt))
    assert text.text == BYTES.decode(ids)
    assert not any("�" in piece[-1:] for piece in pieces[:-1])


@settings(deadline=None, max_examples=60)
@given(
    st.text("ab日é", max_size=24), st.lists(st.text("ab日", min_size=1, max_size=4), max_size=3).map(tuple)
)
def test_stop_strings_do_not_depend_on_tokens(words, stop):
    for tokenizer in (BYTES, BPE):
        text, _ = stream(tokenizer, tokenizer.encode(words), stop)
        assert text.text == cut(words, stop)
        assert text.stopped is any(each in words for each in stop)


def test_incomplete_characters_are_held_back():
    ids = BYTES.encode("é😀!")
    _, pieces = stream(BYTES, ids)
    assert pieces == ["", "é", "", "", "", "😀", "!", ""]
    assert stream(BYTES, ids[:4])[1] == ["", "é", "", "", "�"]


def test_beginnings_of_stop_strings_are_held_back():
    _, pieces = stream(BYTES, BYTES.encode("a\n\nQ"), stop=("\n\nUser:",))
    assert pieces == ["a", "", "", "\n\nQ", ""]
    text, pieces = stream(BYTES, BYTES.encode("a\n\nUser: b"), stop=("\n\nUser:", "zz"))
    assert "".join(pieces) == text.text == "a"
    assert text.push(98) == text.finish() == ""
    assert stream(BYTES, BYTES.encode("a\n\n"), stop=("\n\nUser:",))[0].text == "a\n\n"
    assert stream(BYTES, [97, 0xE2], stop=("�",))[0].text == "a"  # completed by the last bytes


def test_leading_spaces_stay_after_a_prompt():
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}, unk_token="<unk>")
    )
    library.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(library.to_str())
    assert tokenizer.decode([1]) == "cat"
    assert stream(tokenizer, [1, 2], prompt=[0])[1] == [" cat", "s", ""]
    assert stream(tokenizer, [1, 2, 0] * 9)[0].text == tokenizer.decode([1, 2, 0] * 9)


def test_special_tokens_have_no_text():
    for tokenizer in (BYTES, BPE):
        end = tokenizer.end_id
        assert stream(tokenizer, [end, *tokenizer.encode("hi"), end])[0].text == "hi"
