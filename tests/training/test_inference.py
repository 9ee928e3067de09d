"""A run's model, its template, its completions, and conversations with it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from multipack.cli import app, main
from multipack.data.chat import ChatTemplate
from multipack.data.texts import TextPart
from multipack.data.tokenizer import Tokenizer, byte_tokenizer
from multipack.models.decoder import Decoder
from multipack.models.generate import generate
from multipack.models.sampling import Sampling
from multipack.shapes import ModelShape
from multipack.training import inference
from multipack.training.export import export
from multipack.training.inference import (
    Conversation,
    complete_batch,
    find_template,
    load_run,
    print_completions,
    read_prompts,
)

TURNS = """{%- for message in messages -%}<|turn|>{{ message.role }}:{{ message.content }}<|over|>{%- endfor -%}
{%- if add_generation_prompt -%}<|turn|>assistant:{%- endif -%}"""
TEMPLATE = ChatTemplate(TURNS, ["<|turn|>", "<|over|>"])


def chat_tokenizer() -> Tokenizer:
    """Bytes, the end token, and two more special tokens."""
    fields = json.loads(byte_tokenizer().to_json())
    for number, name in enumerate(("<|turn|>", "<|over|>"), start=257):
        fields["added_tokens"].append({**fields["added_tokens"][0], "id": number, "content": name})
    return Tokenizer(json.dumps(fields))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    model = Decoder(ModelShape(layers=1, heads=2, d_model=16, d_ff=16, vocabulary_size=259, context=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's directory with one checkpoint: initial weights, written as the trainer writes them."""
    from multipack.parallel.world import World
    from multipack.run import RunDirectory, config_yaml
    from multipack.training.checkpoint import CheckpointWriter
    from multipack.training.run_config import compose_run

    run = RunDirectory(tmp_path_factory.mktemp("runs") / "a")
    wanted = compose_run(["model=tiny", "model.vocabulary_size=259", "model.context=64"])
    text = config_yaml(wanted)
    run.create(text)
    torch.manual_seed(1)
    weights = Decoder(
        ModelShape(layers=2, heads=2, kv_heads=1, d_model=64, d_ff=128, vocabulary_size=259, context=64)
    )
    files = {"config.yaml": text, "tokenizer.json": chat_tokenizer().to_json()}
    state = {"model": dict(weights.named_parameters()), "optimizer": {"none": torch.zeros(1)}}
    CheckpointWriter(run, World(), 0).save(1, state, {}, files)
    return run.path


def fails(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["multipack", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_completion_is_that_of_generate_and_draws_from_its_own_generator(model):
    tokenizer, before = byte_tokenizer(), torch.get_rng_state()
    text = complete_batch(model, tokenizer, ["ab"], Sampling(20, 0.9, 50, seed=3))[0].text
    generator = torch.Generator().manual_seed(3)
    ids = generate(model, [97, 98], 20, 0.9, 50, tokenizer.end_id, generator, tokenizer.vocabulary_size)
    assert text == tokenizer.decode(ids) != ""
    assert torch.equal(before, torch.get_rng_state())
    prompts = ["q", "ab"]
    found = complete_batch(model, tokenizer, prompts, Sampling(20, 0.9, 50, seed=2))
    assert found[1].text == text


def test_a_conversation_is_encoded_as_its_template_writes_it(model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "multipack.training.inference.generate_batch",
        lambda model, ids, sampling, **others: (
            asked.append((ids, sampling, others)) or _answers(next(answers))
        ),
    )
    answers = iter(["yes", "no"])
    tokenizer = chat_tokenizer()
    conversation = Conversation(model, tokenizer, TEMPLATE, Sampling(seed=5), system="be brief")
    assert conversation.say("is <|over|> special?").text == "yes"
    assert conversation.say("sure?").text == "no"
    (first,), sampling, others = asked[0]
    spelled = tokenizer.encode("user:is <|over|> special?")
    assert 258 not in spelled
    assert first == [
        257,
        *tokenizer.encode("system:be brief"),
        258,
        257,
        *spelled,
        258,
        257,
        *tokenizer.encode("assistant:"),
    ]
    assert set(others["end_ids"]) == {256, 258}
    assert sampling.seed == 5
    (second,), sampling, _ = asked[1]
    assert second[: len(first)] == first
    assert second[len(first) :] == [
        *tokenizer.encode("yes"), 258, 257, *tokenizer.encode("user:sure?"), 258, 257, *tokenizer.encode("assistant:")
    ]  # fmt: skip
    assert sampling.seed == 6
    assert conversation.num_read == len(second)
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 2]


def _answers(text):
    from multipack.models.generate import Completion

    return [Completion([0], "end", text)]


def test_an_answer_ends_where_its_turn_does(model):
    """A model that says `<|over|>` after its first token."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(2)
    with torch.no_grad():
        taught = Decoder(model.shape)
        # Nothing but the embedding: after "!" comes <|over|>, after all else "!".
        for name, parameter in taught.named_parameters():
            if name.startswith("blocks"):
                parameter.zero_()
        hidden = torch.eye(16)
        weight = taught.embedding.weight
        weight.zero_()
        weight[:] = hidden[0]
        weight[ord("!")] = hidden[1] + 2 * hidden[0]
        weight[258] = 9 * hidden[1]
    pieces = []
    answer = Conversation(taught, tokenizer, TEMPLATE, Sampling(8, 0)).say("hi", pieces.append)
    assert (answer.text, answer.reason, answer.tokens) == ("!", "end", [ord("!")])
    assert pieces == ["!"]


def test_a_refused_message_is_not_remembered(model):
    conversation = Conversation(model, chat_tokenizer(), TEMPLATE, Sampling(2))
    conversation.say("a")
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="surrogate"):
        conversation.say("half \ud800 pair")
    assert conversation.messages == before
    with pytest.raises(ValueError, match=r"<\|over\|>"):
        Conversation(model, byte_tokenizer(), TEMPLATE, Sampling())


def test_a_run_and_its_checkpoint_are_the_same_model(trained):
    model, tokenizer = load_run(trained)
    other, _ = load_run(trained / "checkpoints" / "step-00000001")
    assert not model.training
    assert tokenizer.vocabulary_size == 259
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(FileNotFoundError, match="neither a run directory"):
        load_run(trained / "checkpoints")


def test_an_export_writes_what_its_run_does(trained, tmp_path):
    export(trained, tmp_path / "export")
    found = [
        complete_batch(*load_run(path), ["abc"], Sampling(20, 0.9)) for path in (trained, tmp_path / "export")
    ]
    assert found[0] == found[1]
    (tmp_path / "export" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_run(tmp_path / "export")


def test_a_template_is_found_beside_the_weights_in_the_run_or_in_the_store(trained, tmp_path):
    assert find_template(trained) is None
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    checkpoint, store = run / "checkpoints" / "step-00000001", tmp_path / "chats.store"
    store.mkdir()
    config = (checkpoint / "config.yaml").read_text()
    pointing = config.replace("source: stdlib", "source: store").replace("  path: ''", f"  path: {store}", 1)
    assert pointing.count(str(store)) == 1
    (checkpoint / "config.yaml").write_text(pointing)
    # The nearest to the weights counts.
    for folder in (store, run, checkpoint):
        template = ChatTemplate(TURNS + folder.name, TEMPLATE.special_tokens)
        (folder / "chat_template.json").write_text(template.to_json())
        assert find_template(run).source == find_template(checkpoint).source == template.source


def test_an_exports_template_is_its_tokenizers(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    chat_tokenizer().save(tmp_path / "tokenizer.json")
    assert find_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TURNS}))
    template = find_template(tmp_path)
    assert template.source == TURNS
    assert template.end_of_turn == "<|over|>"
    assert template.prompt_parts([{"role": "user", "content": "a"}])[0] == TextPart("<|turn|>", False, True)


@pytest.fixture
def run(trained):
    def invoke(*words, stdin=None):
        return CliRunner().invoke(
            app, ["generate", str(trained), *words], input=stdin, catch_exceptions=False
        )

    return invoke


def test_several_prompts_are_completed_as_each_alone(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("two words\r\nthrée\n".encode())
    rest = ("--max-tokens", "9", "--temperature", "0")
    shown = json.loads(run("--prompt", "one", "--prompts", str(file), *rest, "--json").stdout)
    found = {entry["prompt"]: entry for entry in shown["completions"]}
    assert list(found) == ["one", "two words", "thrée"]
    assert found["thrée"]["prompt_tokens"] == 6
    assert {(entry["reason"], entry["new_tokens"]) for entry in found.values()} == {("length", 9)}
    for prompt, entry in found.items():
        assert run("--prompt", prompt, *rest).stdout == prompt + entry["text"] + "\n"
    printed = run("--prompts", "-", *rest, stdin="one\ntwo words\n").stdout
    expected = [found[name]["prompt"] + found[name]["text"] for name in ("one", "two words")]
    assert printed == f"=== 1 of 2\n{expected[0]}\n=== 2 of 2\n{expected[1]}\n"


def test_notes_go_to_standard_error(run):
    shown = run("--prompt", "x" * 70, "--max-tokens", "3", "--timing")
    assert shown.stdout.startswith("x" * 70)
    assert "prompt 1 has 70 tokens: the model sees the last 64 of them (model.context)" in shown.stderr
    assert "3 tokens after 70 of prompts" in shown.stderr
    assert "tokens/s" in shown.stderr
    assert "note" not in shown.stdout


def test_one_prompt_is_streamed_to_a_terminal_without_control_characters(trained, monkeypatch, capsys):
    written = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(inference, "_print", lambda text, end="": written.append(text + end))
    print_completions(trained, ["a"], Sampling(6, 0), "cpu")
    assert written[0] == "a"
    assert len(written) > 3
    assert written[-1] == "\n"
    monkeypatch.undo()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    inference._print("a\x1b[2Jb")
    assert capsys.readouterr().out == "a�[2Jb"


def test_chat_answers_lines_until_the_input_ends(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (copy / "chat_template.json").write_text(TEMPLATE.to_json())
    words = ["generate", str(copy), "--chat", "--max-tokens", "4", "--temperature", "0", "--system", "short"]
    shown = CliRunner().invoke(app, words, input="hello\n\n  \nagain\n", catch_exceptions=False)
    model, tokenizer = load_run(copy)
    conversation = Conversation(model, tokenizer, TEMPLATE, Sampling(4, 0, 50), "short")
    answers = [conversation.say(line) for line in ("hello", "again")]
    assert shown.stdout == "".join(f"{answer.text}\n" for answer in answers)
    assert shown.stderr.count("cut after 4 tokens: --max-tokens allows more") == 2
    assert f"the conversation has {conversation.num_read} tokens" in shown.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], '--prompt "TEXT"'),
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
        (["--chat", "--prompt", "a"], "omit --prompt, --prompts and --json"),
        (["--chat"], "has no chat template (chat_template.json)"),
    ],
)
def test_mistakes_are_one_line(trained, monkeypatch, capsys, tmp_path, words, told):
    for name, content in (("EMPTY", b""), ("GAP", b"a\n\nb\n"), ("BINARY", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
    known = {name: str(tmp_path / name) for name in ("EMPTY", "GAP", "BINARY")}
    error = fails(monkeypatch, capsys, "generate", trained, *(known.get(word, word) for word in words))
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1


def test_prompts_are_lines_of_files_after_those_of_the_command(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("b \u2028 c\nd", encoding="utf-8")
    assert read_prompts(["a\n"], str(file)) == ["a\n", "b \u2028 c", "d"]
    assert read_prompts([], str(Path(file))) == ["b \u2028 c", "d"]
