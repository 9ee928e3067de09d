"""What a stranger's folder or text could do: run code when it is opened, fetch code, or command the terminal."""

import builtins
import json
import shutil
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipack.untrusted import one_line, printable, printable_json

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast, LlamaConfig as Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A folder that asks for its own code, whose user answers y; whether the code ran."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker, folder = tmp_path / "marker", tmp_path / "folder"
    folder.mkdir()
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    names = {"AutoTokenizer": [None, "code.Tokenizer"], "AutoConfig": "code.Config"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": names}))
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard", "auto_map": names}))
    yield folder
    assert not marker.exists()


def test_code_of_a_tokenizer_is_refused(hostile):
    from multipack.data.text.tokenizer import TokenizerConfig, load_tokenizer

    with pytest.raises(ValueError, match=r"tokenizer\.path=.* code of its own") as refused:
        load_tokenizer(TokenizerConfig("transformers", str(hostile)))
    assert "\n" not in str(refused.value)


def test_code_of_a_model_is_refused(hostile):
    from multipack.models.foreign import read_config
    from multipack.models.tiny_models import load_causal_model

    for read in (read_config, load_causal_model):
        with pytest.raises(ValueError, match="code of its own") as refused:
            read(str(hostile))
        assert "\n" not in str(refused.value)


def test_code_beside_a_gguf_file_is_not_run(hostile, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from multipack.hub import model_folder

    asked = []

    def read(*_, **options):
        asked.append(options.get("trust_remote_code"))
        return options.get("dtype"), {"missing_keys": []}

    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", read)
    file = hostile / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(AttributeError, match="save_pretrained"):  # of what stands for the model
        model_folder(str(file), "x")
    assert asked == [False, False]


def test_a_kernel_that_a_configuration_names_is_not_fetched(tmp_path, monkeypatch):
    """Every way to open a model asks for an implementation of its own, whatever config.json says."""
    transformers = pytest.importorskip("transformers")
    from hf_models import save_model
    from multipack.models.foreign import foreign_shape, open_foreign
    from multipack.models.tiny_models import load_causal_model

    save_model("llama", tmp_path)
    file = tmp_path / "config.json"
    kernel = {"attn_implementation": "kernels-community/flash-attn3"}
    file.write_text(json.dumps(json.loads(file.read_text()) | kernel))
    with pytest.raises(ImportError, match="kernels"):  # transformers by itself
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    name = "embedding.weight"
    assert open_foreign(foreign_shape(str(tmp_path)))(name).shape == (264, 16)
    assert open_foreign(foreign_shape(str(tmp_path)), seed=1)(name).shape == (264, 16)
    for tiny in (False, True):
        assert load_causal_model(str(tmp_path), tiny=tiny)


HOSTILE = ["\x1b]0;title\x07", "\x1b[31mred", "\x9b2J", "\x9dosc", "\r", "\u2028", "\u202e", "\ud800", "\x7f"]
texts = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("".join(HOSTILE))))


def obeyed(text, but="\t\n"):
    """Characters that do something to a terminal, or end a line, by their classes in Unicode."""
    turns = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    return [
        each
        for each in text
        if unicodedata.category(each) in {"Cc", "Zl", "Zp", "Cs"} or unicodedata.bidirectional(each) in turns
        if each not in but
    ]


@given(texts)
def test_text_has_no_character_that_a_terminal_obeys(text):
    shown = printable(text)
    changed = [a for a, b in zip(text, shown, strict=True) if a != b]
    assert changed == obeyed(text)
    assert not obeyed(one_line(text), but="\t")
    shown.encode()
    values = json.dumps([text], ensure_ascii=False)
    assert json.loads(printable_json(values)) == [text]
    assert not obeyed(printable_json(values))


ESCAPES = "\x1b]0;title\x07\x1b[31mred\x9b2J\u2028end\u202e"


@pytest.fixture
def foreign_run(tmp_path):
    """A run directory in which a stranger chose all names and texts."""
    path = tmp_path / f"run{ESCAPES}"
    path.mkdir()
    (path / "config.yaml").write_text(json.dumps({"train": {"steps": 2}, f"own{ESCAPES}": ESCAPES}))
    steps = [{"step": n, "loss": 1.0, "dt": 1.0, "tps": 9.0, f"metric{ESCAPES}": 2.0} for n in (1, 2)]
    rest = [f"no json {ESCAPES}", json.dumps({f"other{ESCAPES}": ESCAPES})]
    (path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, steps), *rest]) + "\n")
    facts = {"run": [["model", ESCAPES]], "notes": [ESCAPES], "left_out": [ESCAPES], "details": [ESCAPES]}
    ends = {"event": "end", "step": ESCAPES, "reason": ESCAPES}
    (path / "history.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in ({"event": "start", "step": 0, **facts}, ends))
    )
    (path / "samples.txt").write_text(f"=== step 1\nonce▌ {ESCAPES}\n\n")
    (path / "documents.jsonl").write_text(json.dumps({f"kind{ESCAPES}": ESCAPES}) + "\n")
    (path / "checkpoints" / f"step-00000002{ESCAPES}").mkdir(parents=True)
    (path / "checkpoints" / "latest").write_text(ESCAPES)
    return path


def test_no_command_shows_what_a_terminal_obeys(foreign_run, tmp_path, monkeypatch, capsys):
    from multipack.cli import main

    other = shutil.copytree(foreign_run, tmp_path / "other")
    (other / "config.yaml").write_text(json.dumps({"train": {"steps": 3}, f"own{ESCAPES}": ESCAPES * 2}))
    config = tmp_path / "axolotl.yml"
    config.write_text(
        json.dumps({"base_model": "a/b", f"key{ESCAPES}": ESCAPES, "datasets": [{"path": "c"}]})
    )
    commands = [
        ["import-config", str(config)],
        ["report", str(foreign_run)],
        ["report", str(foreign_run), str(other)],
        ["watch", str(foreign_run), "--once"],
        *(["doctor", str(foreign_run), *more] for more in ([], ["--json"])),
        *(["audit", str(foreign_run), *more] for more in ([], ["--json"])),
        ["train", f"{ESCAPES}=1"],
        ["train", "data=jsonl", f"data.path={foreign_run}"],
        [ESCAPES],
    ]
    for command in commands:
        monkeypatch.setattr("sys.argv", ["multipack", *command])
        with pytest.raises(SystemExit):
            main()
        printed = "".join(capsys.readouterr())
        assert printed
        assert not obeyed(printed), command
