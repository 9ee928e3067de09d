"""Documents are shown with their targets, and what is trained otherwise than it seems to be is counted and named."""

import io
import json

import pytest

from multipack.data.stores.prepare import prepare
from multipack.data.stores.store import TokenStore
from multipack.data.text.tokenizer import TokenizerConfig
from multipack.data.views.corpus import load_corpus
from multipack.data.views.documents import Documents
from multipack.data.views.shown import show
from multipack.reports.console import Console

WITHOUT_CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)
ASKED = {"role": "user", "content": "Weather?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLED = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
PLAIN = [ASKED, {"role": "assistant", "content": "Rain."}]
BYTES = TokenizerConfig(kind="byte")


@pytest.fixture
def prepared(config, tmp_path):
    def make(records, template="", **settings):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        if template:
            (tmp_path / "own.jinja").write_text(template)
            settings |= {"chat_template": str(tmp_path / "own.jinja")}
            settings |= {"special_tokens": ["<|im_start|>", "<|im_end|>"]}
        return config(source="jsonl", path=str(path), **settings)

    return make


def warnings(data):
    return TokenStore(prepare(data, BYTES)).warnings


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "with tools, which the template lists"])
def test_calls_that_a_template_drops_and_empty_answers(prepared, tools):
    records = [{"messages": messages, "tools": tools} for messages in (PLAIN, CALLED, PLAIN, CALLED)]
    found = warnings(prepared(records, WITHOUT_CALLS))
    assert len(found) == 2
    assert all(text.startswith("2 of 4 conversations with ") for text in found)
    assert all(text.endswith("(the first: records.jsonl:2)") for text in found)
    assert "tool_calls that the chat template does not write" in " ".join(found)
    assert "an empty answer" in " ".join(found)
    assert warnings(prepared(records)) == []  # the built-in template writes calls


def test_ends_that_are_no_targets(prepared):
    (found,) = warnings(prepared([{"messages": PLAIN}] * 3, WITHOUT_END))
    assert found.startswith("3 of 3 conversations with an answer whose end is no target")


def test_answers_that_are_cut_off_are_counted(prepared):
    records = [{"prompt": "p" * 6, "completion": "c" * n} for n in (2, 9, 30)]
    records.append({"prompt": "p" * 30, "completion": "c"})
    found = load_corpus(prepared(records, overlong="truncate", validation=0.0), BYTES, limit=20)
    assert found.train_fit.cut_answers == 2
    assert "targets cut off in 2)" in found.train_fit.describe()


def test_documents_are_shown_with_roles_ends_and_targets(prepared):
    documents = Documents.whole(TokenStore(prepare(prepared([{"messages": CALLED[:1] + PLAIN[1:]}]), BYTES)))
    (shown,) = show(documents, 0)
    assert "".join(part.text for part in shown.parts) == (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\nRain.<|im_end|>\n"
    )
    assert [part.text for part in shown.parts if part.is_target] == ["Rain.", "<|im_end|>"]
    assert (shown.tokens, shown.targets) == (len(documents[0].tokens), 6)


def test_both_answers_of_a_pair_are_shown_and_spaces_stay(prepared):
    pair = {"prompt": "Say", "chosen": " yes \x1b[31m", "rejected": " no"}
    documents = Documents.whole(TokenStore(prepare(prepared([pair], between=""), BYTES)))
    chosen, rejected = show(documents, 0)
    assert (chosen.name, rejected.name) == ("records.jsonl:1, chosen", "records.jsonl:1, rejected")
    assert [part.text for part in rejected.parts] == ["Say", " no", "<|endoftext|>"]
    piped = io.StringIO()
    Console(stream=piped).marked(chosen.parts)
    assert piped.getvalue() == "Say⟦ yes �[31m<|endoftext|>⟧\n"


def test_labels_of_answers_are_shown(prepared):
    records = [{"prompt": "Q", "completion": f"A{n}", "label": n == 0} for n in range(2)]
    documents = Documents.whole(TokenStore(prepare(prepared(records), BYTES)))
    assert (documents.labels.tolist(), documents.weights.tolist()) == ([True, False], [1.0, 1.0])
    names = [shown.name.partition(", ")[2] for index in range(2) for shown in show(documents, index)]
    assert names == ["desirable", "another record's answer", "undesirable", "another record's answer"]


def test_a_terminal_shows_targets_in_inverse_video(prepared, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    documents = Documents.whole(TokenStore(prepare(prepared([{"messages": PLAIN}]), BYTES)))
    screen = Terminal()
    Console(stream=screen).marked(show(documents, 0)[0].parts)
    assert "\x1b[7mRain.\x1b[0m\x1b[1;7m<|im_end|>" in screen.getvalue()
    assert "⟦" not in screen.getvalue()
