import base64
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multipack.data.text import tokenizer as room
from multipack.data.text.data_config import DataConfig
from multipack.data.text.sources import Source
from multipack.data.text.texts import TextPart
from multipack.data.text.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    build_tokenizer,
    byte_tokenizer,
    character_tokenizer,
    train_bpe,
)

CORPUS = [
    "def f(x):\n    return x + 1\n",
    "for i in range(10):\n    print(i, i * i)\n",
    "naïve café ☕\n",
] * 20
BYTE = byte_tokenizer()
BPE = train_bpe(iter(CORPUS), 300)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
@settings(deadline=None, max_examples=15)
@given(text=ANY_TEXT)
@example(text="a<|endoftext|>b")
@example(text="<|endoftext|>")
@example(text="\ufeff\r\n\t\0 日本 👩‍👩‍👧  a  b don't ")
@example(text="")
def test_decoding_inverts_encoding_and_text_is_never_the_end_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_id not in ids
    if tokenizer is BYTE:
        assert ids == list(text.encode())
        assert (BYTE.vocabulary_size, BYTE.end_id) == (257, 256)


def test_characters_are_sorted():
    tokenizer = character_tokenizer(iter(["ba\n", " é"]))
    assert tokenizer.encode("\n abé") == [0, 1, 2, 3, 4]
    assert tokenizer.decode([3, 4, 0]) == "bé\n"
    assert (tokenizer.vocabulary_size, tokenizer.end_id) == (5, None)


def test_training_is_deterministic_and_compresses():
    again = train_bpe(iter(CORPUS), 300)
    assert again.to_json() == BPE.to_json()
    assert again.hash == BPE.hash != train_bpe(iter(CORPUS), 290).hash
    assert BPE.vocabulary_size == 300
    text = "".join(CORPUS)
    assert len(BPE.encode(text)) < 0.6 * len(BYTE.encode(text))
    assert BPE.encode("\n")[0] != BPE.end_id is not None


NAMES = ["<|im_start|>", "<|im_end|>"]
PARTS = [
    TextPart("<|im_start|>", False, True),
    TextPart("user: <|im_end|>", False),
    TextPart("<|im_end|>", True, True),
    TextPart(" c", True),
]


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(NAMES),
        train_bpe(iter(CORPUS), 300, NAMES),
        character_tokenizer(iter(["user: <|im_end|> c"]), NAMES),
    ],
    ids=["byte", "bpe", "char"],
)
def test_special_parts_are_one_token_and_text_never_is(tokenizer):
    first, second = tokenizer.encode_parts([PARTS, [TextPart("c", False)]])
    start, end = (tokenizer.special_id(name) for name in NAMES)
    assert [ids for ids, _ in first] == [
        [start],
        tokenizer.encode("user: <|im_end|>"),
        [end],
        tokenizer.encode(" c"),
    ]
    assert [is_target for _, is_target in first] == [False, False, True, True]
    assert second == [(tokenizer.encode("c"), False)]
    assert not {start, end} & set(first[1][0])
    assert tokenizer.decode(first[1][0]) == "user: <|im_end|>"
    assert tokenizer.encode_parts([]) == []
    again = Tokenizer(tokenizer.to_json())
    assert again.encode_parts([PARTS]) == [first]


def test_special_tokens_of_chats_are_trained_in(config, text_file, tmp_path):
    record = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    path = text_file(json.dumps(record) + "\n", "a.jsonl")
    source = Source(config(source="jsonl", path=path))
    for kind in ("bpe", "char", "byte"):
        tokenizer = build_tokenizer(TokenizerConfig(kind, vocabulary_size=280), source, tmp_path)
        (encoded,) = tokenizer.encode_parts([document.parts for document in source])
        assert encoded[0] == ([tokenizer.special_id("<|im_start|>")], False)
        assert tokenizer.end_id == tokenizer.special_id("<|im_end|>" if kind == "char" else room.END)


def _metaspace(scheme):
    vocabulary = {token: number for number, token in enumerate("▁abc<s>")}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.add_special_tokens(["<e>"])
    if scheme == "legacy":
        library.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        )
    else:
        library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("▁", scheme)
    return library


@pytest.mark.parametrize("scheme", ["never", "first", "always", "legacy"])
def test_no_space_is_added_inside_a_document(scheme):
    library = _metaspace(scheme)
    tokenizer = Tokenizer(library.to_str())
    parts = [
        TextPart("a", False),
        TextPart("b", True),
        TextPart("<e>", True, True),
        TextPart("a c", False),
        TextPart("b", True),
    ]
    (encoded,) = tokenizer.encode_parts([parts])
    ids = [token for tokens, _ in encoded for token in tokens]
    assert ids == library.encode("ab<e>a cb", add_special_tokens=False).ids


def test_a_saved_tokenizer_is_the_same(tmp_path):
    for tokenizer in (BYTE, BPE, letters()):
        tokenizer.save(tmp_path / "tokenizer.json")
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            loaded = Tokenizer.load(path, tokenizer.name)
            assert loaded.hash == tokenizer.hash
            assert (loaded.end_id, loaded.name) == (tokenizer.end_id, tokenizer.name)
        library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert library.encode("abcabc").ids == tokenizer.encode("abcabc")


def test_the_hash_does_not_depend_on_the_order_of_keys_nor_on_truncation():
    fields = json.loads(BPE.to_json())
    fields["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    shuffled = Tokenizer(json.dumps(dict(reversed(fields.items())), indent=2))
    assert shuffled.hash == BPE.hash
    assert shuffled.encode("return x + 1") == BPE.encode("return x + 1")


def test_the_end_token_of_a_foreign_tokenizer_is_found():
    for end in ("</s>", "<|end_of_text|>", "[EOS]"):
        library = tokenizers.Tokenizer.from_str(train_bpe(iter(CORPUS), 260).to_json().replace(room.END, end))
        assert Tokenizer(library.to_str()).end_id == library.token_to_id(end)


def test_an_added_token_without_characters_is_none():
    fields = json.loads(BYTE.to_json())
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": 999, "content": ""})
    tokenizer = Tokenizer(json.dumps(fields))
    assert tokenizer.special_tokens == BYTE.special_tokens
    assert tokenizer.encode("abc") == BYTE.encode("abc")


def test_steps_of_files_in_use_are_within_bounds():
    """Spaces to underscores, as in Llama 2, and marks for several characters that need some."""
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "NFKC"}]
    steps += [
        {"type": "Replace", "pattern": {"String": each}, "content": f"<{number}x>"}
        for number, each in enumerate(" \n\t|()[]{}abcdefg")
    ]
    written = changed(normalizer={"type": "Sequence", "normalizers": steps})
    assert written.decode(written.encode("h i")) == "▁h<0x>i"


def not_special():
    """A tokenizer whose chat tokens any text can spell."""
    fields = json.loads(byte_tokenizer(NAMES).to_json())
    for token in fields["added_tokens"]:
        token["special"] = False
    return Tokenizer(json.dumps(fields))


def changed(model=None, **parts):
    """The byte tokenizer with other parts in its file."""
    fields = json.loads(BYTE.to_json())
    return Tokenizer(json.dumps({**fields, **parts, "model": {**fields["model"], **(model or {})}}))


def table(size, *texts):
    """A normalizer with a table of characters: the stated size of the trie, an empty trie of 4 bytes, and texts."""
    content = size.to_bytes(4, "little") + bytes(4) + b"\0".join(texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": steps}


def replaced(pattern, content, times=1):
    step = {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
    return sequence(*[step] * times)


STEP = {"type": "Prepend", "prepend": "a"}


SPLIT = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


def letters(names=()):
    return character_tokenizer(iter(["abc"]), names)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: BYTE.decode([65, 257]), "token 257 is outside the vocabulary of 257"),
        (lambda: BYTE.decode([65, -1]), "token -1 is outside the vocabulary of 257"),
        (lambda: Tokenizer.load(Path("/nowhere")), r"there is no tokenizer\.json"),
        (lambda: Tokenizer.load(Path(__file__)), r"test_tokenizer\.py: not a tokenizer\.json"),
        (lambda: changed(normalizer=table(1 << 31, b"a")), "trie of 2,147,483,648 bytes, and has 9"),
        (lambda: changed(normalizer=sequence(STEP, table(1 << 31, b"a"))), "trie of 2,147,483,648 bytes"),
        (lambda: changed(normalizer=table(4, b"\xff")), r"not a tokenizer\.json: .*utf-8"),
        (lambda: changed(normalizer=table(4, b"a" * 2000)), "at least 2,000 characters"),
        (lambda: changed(normalizer=table(4, b"a")).encode("some"), "fails: .*index out of bounds"),
        (lambda: changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "not a tok"),
        (lambda: changed(normalizer=replaced("a", "a" * 900, 4)), "normalizer .*1,000 are the limit"),
        (lambda: changed(normalizer=replaced("b*", "a", 40)), r"not a tokenizer\.json|are the limit"),
        (lambda: changed(normalizer=replaced("a", "b", 99)), "99 steps"),
        (lambda: changed(pre_tokenizer=SPLIT).encode("x" * 50), "fails: .*retry-limit"),
        (lambda: changed({"dropout": 0.1}), r"dropout=0\.1"),
        (lambda: letters().encode("aXbé"), r"'X' \(U\+0058\), 'é' \(U\+00E9\).*kind=byte"),
        (lambda: letters().encode_parts([[TextPart("a", True), TextPart("X", True)]]), r"U\+0058"),
        (lambda: character_tokenizer(iter([])), "no text"),
        (lambda: BYTE.encode_parts([PARTS]), r"no token '<\|im_start\|>', .*data\.chat_template=plain"),
        (lambda: not_special().encode_parts([PARTS]), "as a token that any text can spell"),
        (lambda: train_bpe(iter(CORPUS), 258, NAMES), r"_size=258: at least 259 .*<\|im_end\|>"),
        (lambda: TokenizerConfig("bytes").check(), r"tokenizer\.kind='bytes'.*nearest: byte"),
        (lambda: TokenizerConfig("file").check(), r"tokenizer\.kind=file needs tokenizer\.path"),
        (lambda: TokenizerConfig("char", "x").check(), r"tokenizer\.path='x'.*tokenizer\.kind=char"),
    ],
)
def test_impossible_requests_are_refused_by_name(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


@pytest.fixture
def source(text_file):
    def make(text="one two three " * 50):
        return Source(DataConfig(source="text", path=text_file(text)))

    return make


def test_trained_tokenizers_are_kept_by_corpus_and_settings(source, tmp_path, monkeypatch):
    trained = []
    train = room.train_bpe
    monkeypatch.setattr(room, "train_bpe", lambda *given: trained.append(given[1]) or train(*given))
    config = TokenizerConfig(vocabulary_size=260)
    corpus = source()
    first = build_tokenizer(config, corpus, tmp_path / "cache")
    assert build_tokenizer(config, corpus, tmp_path / "cache").hash == first.hash
    assert trained == [260]
    build_tokenizer(TokenizerConfig(vocabulary_size=261), corpus, tmp_path / "cache")
    build_tokenizer(config, source("other text " * 9), tmp_path / "cache")
    assert trained == [260, 261, 260]
    assert first.name == "bpe 260"


def test_each_kind_is_built(source, tmp_path):
    seen = []
    assert build_tokenizer(TokenizerConfig("byte"), source(), tmp_path).hash == BYTE.hash
    character = build_tokenizer(TokenizerConfig("char"), source(), tmp_path, lambda *done: seen.append(done))
    assert character.vocabulary_size == len(set("one two three"))
    assert seen[-1] == (700, 700, "bytes read for the tokenizer")
    BPE.save(tmp_path / "mine.json")
    mine = build_tokenizer(TokenizerConfig("file", str(tmp_path / "mine.json")), source(), tmp_path)
    assert (mine.hash, mine.name) == (BPE.hash, "file mine.json")
