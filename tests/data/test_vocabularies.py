"""Tokenizers of other packages: each test needs the package that it is about."""

import importlib.util
import json
import sys

import pytest

from multipack.data.text.chat import ChatTemplate, resolve_template
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import TokenizerConfig, byte_tokenizer, load_tokenizer


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
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


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"kind=transformers needs the package .*\[transformers\]"):
        load_tokenizer(TokenizerConfig("transformers", "x"))


def test_a_kind_that_must_be_trained_is_refused():
    for kind in ("auto", "bpe", "char"):
        with pytest.raises(ValueError, match=rf"tokenizer\.kind={kind} is trained on a complete corpus"):
            load_tokenizer(TokenizerConfig(kind))
    assert load_tokenizer(TokenizerConfig("byte"), ["<x>"]).special_id("<x>") == 257
