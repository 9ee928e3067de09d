"""A run's model, its template, its completions, and conversations with it."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from typer.testing import CliRunner

from multipack.cli import app, main
from multipack.data.text.chat import ChatTemplate
from multipack.data.text.texts import TextPart
from multipack.data.text.tokenizer import byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.models.generate import Completion, generate
from multipack.models.sampling import Sampling
from multipack.shapes import ModelShape
from multipack.training import inference
from multipack.training.export import export
from multipack.training.inference import (
    answer,
    complete_batch,
    find_template,
    load_run,
    print_completions,
)

TURNS = """{%- for message in messages -%}<|turn|>{{ message.role }}:{{ message.content }}<|over|>{%- endfor -%}
{%- if add_generation_prompt -%}<|turn|>assistant:{%- endif -%}"""
TEMPLATE = ChatTemplate(TURNS, ["<|turn|>", "<|over|>"])


@pytest.fixture(scope="module")
def tokenizer(chat_tokenizer):
    return chat_tokenizer("<|turn|>", "<|over|>")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    model = Decoder(ModelShape(layers=1, heads=2, d_model=16, d_ff=16, vocabulary_size=259, context=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory, save_decoder, tokenizer):
    """A run's directory with one checkpoint of initial weights."""
    torch.manual_seed(1)
    shape = ModelShape(layers=2, heads=2, kv_heads=1, d_model=64, d_ff=128, vocabulary_size=259, context=64)
    return save_decoder(tmp_path_factory.mktemp("runs") / "a", Decoder(shape), tokenizer)


def fails(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["multipack", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_completion_equals_generate_and_has_its_own_generator(model):
    tokenizer, before = byte_tokenizer(), torch.get_rng_state()
    sampling = Sampling(20, 0.9, 50, seed=3)
    text = complete_batch(model, tokenizer, ["ab"], sampling)[0].text
    limits = {"end_ids": [tokenizer.end_id], "vocabulary_size": tokenizer.vocabulary_size}
    (found,) = generate(model, [[97, 98]], sampling, **limits)
    assert text == tokenizer.decode(found.tokens) != ""
    assert torch.equal(before, torch.get_rng_state())
    prompts = ["q", "ab"]
    found = complete_batch(model, tokenizer, prompts, Sampling(20, 0.9, 50, seed=2))
    assert found[1].text == text


def test_a_conversation_is_encoded_as_its_template_writes_it(model, tokenizer, monkeypatch):
    asked = []

    def record(model, ids, sampling, **others):
        asked.append((*ids, sampling.seed, set(others["end_ids"])))
        return [Completion([0], "end", "yes")]

    monkeypatch.setattr(inference, "generate", record)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "is <|over|> special?"},
    ]
    assert answer(model, tokenizer, TEMPLATE, messages, Sampling(seed=5))[0].text == "yes"
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}]
    answer(model, tokenizer, TEMPLATE, messages, Sampling(seed=5))
    (first, seed, ends), (second, next_seed, _) = asked
    assert (seed, next_seed, ends) == (5, 6, {256, 258})

    def turn(text):
        return [257, *tokenizer.encode(text)]

    # What a user spells is text, not a special token.
    before = [*turn("system:be brief"), 258, *turn("user:is <|over|> special?"), 258, *turn("assistant:")]
    assert before.count(258) == 2
    assert first == before
    assert second == [*before, *tokenizer.encode("yes"), 258, *turn("user:sure?"), 258, *turn("assistant:")]


def test_an_answer_ends_with_its_turn(model, tokenizer):
    """A model that says `<|over|>` after its first token."""
    torch.manual_seed(2)
    with torch.no_grad():
        taught = Decoder(model.shape)
        # Nothing but the embedding: after "!" comes <|over|>, after all else "!".
        for name, parameter in taught.named_parameters():
            if name.startswith("blocks"):
                parameter.zero_()
        hidden = torch.eye(16)
        weight = taught.embedding.weight
        weight[:] = hidden[0]
        weight[ord("!")] = hidden[1] + 2 * hidden[0]
        weight[258] = 9 * hidden[1]
    pieces, messages = [], [{"role": "user", "content": "hi"}]
    found, _ = answer(taught, tokenizer, TEMPLATE, messages, Sampling(8, 0), pieces.append)
    assert (found.text, found.reason, found.tokens) == ("!", "end", [ord("!")])
    assert pieces == ["!"]
    with pytest.raises(ValueError, match=r"<\|turn\|>"):
        answer(taught, byte_tokenizer(), TEMPLATE, messages, Sampling())


def test_a_run_its_checkpoint_and_its_export_are_the_same_model(trained, tmp_path):
    export(trained, tmp_path / "export")
    folders = (trained, trained / "checkpoints" / "step-00000001", tmp_path / "export")
    first, *others = (complete_batch(*load_run(path), ["abc"], Sampling(20, 0.9)) for path in folders)
    assert others == [first, first]
    with pytest.raises(FileNotFoundError, match="neither a run directory"):
        load_run(trained / "checkpoints")
    (tmp_path / "export" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_run(tmp_path / "export")


def test_a_template_is_found_beside_the_weights_or_in_the_tokenizers_configuration(
    trained, tokenizer, tmp_path
):
    assert find_template(trained) is None
    (tmp_path / "config.json").write_text("{}")
    tokenizer.save(tmp_path / "tokenizer.json")
    assert find_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TURNS}))
    template = find_template(tmp_path)
    assert template.source == TURNS
    assert template.end_of_turn == "<|over|>"
    assert template.parts([{"role": "user", "content": "a"}])[0] == TextPart("<|turn|>", False, True)
    (tmp_path / "chat_template.json").write_text(TEMPLATE.to_json())
    assert find_template(tmp_path).special_tokens == TEMPLATE.special_tokens


@pytest.fixture
def run(trained):
    def invoke(*words, stdin=None):
        return CliRunner().invoke(
            app, ["generate", str(trained), *words], input=stdin, catch_exceptions=False
        )

    return invoke


def test_several_prompts_are_completed_as_each_alone(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("two \u2028 words\r\nthrée\n".encode())
    rest = ("--max-tokens", "9", "--temperature", "0")
    shown = json.loads(run("--prompt", "one", "--prompts", str(file), *rest, "--json").stdout)
    found = {entry["prompt"]: entry for entry in shown["completions"]}
    assert list(found) == ["one", "two \u2028 words", "thrée"]
    assert found["thrée"]["prompt_tokens"] == 6
    assert {(entry["reason"], entry["new_tokens"]) for entry in found.values()} == {("length", 9)}
    texts = {prompt: prompt + entry["text"] for prompt, entry in found.items()}
    assert run("--prompt", "thrée", *rest).stdout == texts["thrée"] + "\n"
    two = "two \u2028 words"
    printed = run("--prompts", "-", *rest, stdin=f"one\n{two}\n").stdout
    assert printed == f"=== 1 of 2\n{texts['one']}\n=== 2 of 2\n{texts[two]}\n"


def test_notes_go_to_standard_error(run):
    shown = run("--prompt", "x" * 70, "--max-tokens", "3")
    assert shown.stdout.startswith("x" * 70)
    assert "70 tokens were read: the model sees the last 64 of them (model.context)" in shown.stderr
    assert "note" not in shown.stdout


def test_one_prompt_is_printed_to_a_terminal_without_control_characters(trained, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_completions(trained, ["a\x1b[2Jb"], Sampling(6, 0), "cpu")
    printed = capsys.readouterr().out
    assert printed.startswith("a�[2Jb")
    assert len(printed) > len("a [2Jb\n")


def test_chat_answers_lines_until_the_input_ends(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    checkpoint = copy / "checkpoints" / "step-00000001"
    (checkpoint / "chat_template.json").write_text(TEMPLATE.to_json())
    words = ["generate", str(copy), "--chat", "--max-tokens", "4", "--temperature", "0", "--system", "short"]
    shown = CliRunner().invoke(app, words, input="hello\n\n  \nagain\n", catch_exceptions=False)
    model, tokenizer = load_run(copy)
    messages, expected = [{"role": "system", "content": "short"}], ""
    for line in ("hello", "again"):
        messages.append({"role": "user", "content": line})
        found, read = answer(model, tokenizer, TEMPLATE, messages, Sampling(4, 0, 50))
        messages.append({"role": "assistant", "content": found.text})
        expected += f"{found.text}\n"
    assert shown.stdout == expected
    assert shown.stderr.count("cut after 4 tokens: --max-tokens allows more") == 2
    assert f"{read} tokens were read" in shown.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to continue"),
        (["--prompt", ""], "the prompt '' has no tokens"),
        (["--prompt", "a", "--prompt", ""], "prompt 2: the prompt '' has no tokens"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--prompts", "EMPTY"], "line 1 is empty"),
        (["--prompts", "GAP"], "line 2 is empty: every line is a prompt"),
        (["--prompts", "BINARY"], "is not text in UTF-8"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be above 0"),
        (["--prompt", "a", "--stop", ""], "stop has an empty string"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["--prompt", "a", "--device", "cuda:77"], "--device cuda:77 cannot be used here"),
        (["--prompt", "a", "--device", "abacus"], "--device abacus cannot be used here"),
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--chat", "--prompt", "a"], "omit prompts and --json"),
        (["--chat"], "has no chat template (chat_template.json)"),
    ],
)
def test_mistakes_are_one_line(trained, monkeypatch, capsys, tmp_path, words, message):
    for name, content in (("EMPTY", b""), ("GAP", b"a\n\nb\n"), ("BINARY", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
    known = {name: str(tmp_path / name) for name in ("EMPTY", "GAP", "BINARY")}
    error = fails(monkeypatch, capsys, "generate", trained, *(known.get(word, word) for word in words))
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
