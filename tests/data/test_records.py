import json
import math

import pytest

from multipack.data.text import chat_sandbox
from multipack.data.text import records as room
from multipack.data.text.records import read_messages, without_nulls
from multipack.data.text.sources import Source

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
OTHER = {"role": "assistant", "content": "Go away"}
SYSTEM = {"role": "system", "content": "Be nice."}


@pytest.fixture
def read(config, text_file):
    """The source of records, written as JSONL."""

    def make(*records, **fields):
        path = text_file("".join(json.dumps(record) + "\n" for record in records), "a.jsonl")
        return Source(config(source="jsonl", path=path, **fields))

    return make


def text(parts, targets=False):
    return "".join(part.text for part in parts if part.is_target or not targets)


def halves(documents):
    return [document.parts for document in documents]


# --- what a record is ------------------------------------------------------------------------------------


def test_messages_are_written_by_a_template(read):
    source = read({"messages": [USER, ANSWER], "id": 1}, {"messages": [SYSTEM, USER, OTHER]})
    first, second = source
    assert text(first.parts) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert text(first.parts, targets=True) == "Hello<|im_end|>"
    assert text(second.parts, targets=True) == "Go away<|im_end|>"
    assert (first.takes_end, source.find_form().pairs) == (False, False)
    assert source.find_form().special_tokens == ("<|im_start|>", "<|im_end|>")
    assert json.loads(source.find_form().chat_template)["name"] == "chatml"
    assert source.describe() == "a.jsonl, {documents} documents (messages, chatml)"
    named = {"dialog": [USER, ANSWER], "functions": [{"name": "f"}]}
    (document,) = read(named, fields=["dialog"])
    assert text(document.parts, targets=True) == "Hello<|im_end|>"
    (document,) = read(named, fields=["dialog", "functions"], format="chat")
    assert '{"name": "f"}' in text(document.parts)


def test_sharegpt_is_read_as_messages(read):
    tools = json.dumps([{"name": "add"}])
    record = {
        "conversations": [
            {"from": "human", "value": "Hi", "weight": None},
            {"from": "function_call", "value": "{}"},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "Hello"},
        ],
        "system": "Be nice.",
        "tools": tools,
    }
    (document,) = read(record, chat_template="llama3")
    assert text(document.parts, targets=True) == "{}<|eot_id|>Hello<|eot_id|>"
    assert '{"name": "add"}' in text(document.parts)
    assert "system<|end_header_id|>\n\nBe nice." in text(document.parts)
    assert "ipython<|end_header_id|>\n\n4" in text(document.parts)


def test_prompts_and_completions_may_be_messages(read):
    source = read(
        {"prompt": [USER, ANSWER, USER], "completion": [OTHER]}, {"prompt": "Hi", "completion": "Hello"}
    )
    first, second = source
    assert text(first.parts, targets=True) == "Go away<|im_end|>"
    assert text(second.parts, targets=True) == "Hello<|im_end|>"
    assert not first.takes_end


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"messages": [USER], "chosen": ANSWER, "rejected": OTHER},
        {"conversations": [{"from": "human", "value": "Hi"}], "chosen": "Hello", "rejected": "Go away"},
        {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER], "messages": [USER, ANSWER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    ],
)
def test_preferences_of_messages(read, record):
    source = read(record)
    documents = list(source)
    chosen, rejected = halves(documents)
    begin = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text(chosen) == f"{begin}Hello<|im_end|>\n"
    assert text(rejected) == f"{begin}Go away<|im_end|>\n"
    assert text(chosen, targets=True) == "Hello<|im_end|>"
    assert text(rejected, targets=True) == "Go away<|im_end|>"
    assert not any(document.takes_end for document in documents)
    assert source.find_form().pairs


def test_earlier_answers_of_a_preference_are_context(read):
    documents = list(read({"messages": [USER, ANSWER, USER], "chosen": ANSWER, "rejected": OTHER}))
    for half, answer in zip(halves(documents), ("Hello", "Go away"), strict=True):
        assert text(half, targets=True) == f"{answer}<|im_end|>"
        assert text(half).count("Hello") == 1 + (answer == "Hello")


def test_labeled_answers_are_followed_by_those_of_the_record_before(read):
    records = [{"prompt": f"Q{n}", "completion": f"A{n}", "label": n != 1} for n in range(3)]
    source = read(records[0], {"prompt": "Q", "completion": " ", "label": True}, *records[1:])
    for _ in range(2):  # each pass begins anew
        found = [("".join(part.text for part in each.parts), each.weight) for each in source]
        assert found == [
            ("Q0\nA0", 1.0),
            ("Q0\nA0", 1.0),
            ("Q1\nA1", -1.0),
            ("Q1\nA0", 1.0),
            ("Q2\nA2", 1.0),
            ("Q2\nA1", 1.0),
        ]
    assert (source.find_form().name, source.find_form().pairs) == ("label", True)
    assert source.noted.skipped == {"empty completions": 1}
    chats = (
        {"prompt": [USER], "completion": [ANSWER], "label": False},
        {
            "prompt": [USER],
            "completion": [OTHER],
            "label": True,
        },
    )
    assert [text(each.parts, targets=True) for each in read(*chats)][2:] == [
        "Go away<|im_end|>",
        "Hello<|im_end|>",
    ]
    plain = {"prompt": "Q", "completion": "A", "label": "good"}
    assert read(plain).find_form().name == "completion"
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: field 'ok' is 'yes', not true or false"):
        list(
            read(
                {"q": "Q", "a": "A", "ok": 1},
                {"q": "Q", "a": "A", "ok": "yes"},
                fields=["q", "a", "ok"],
                format="label",
            )
        )


def test_weights_of_records(read):
    records = [{"text": "a", "w": 2}, {"text": "b", "w": 0.5}, {"text": "c", "w": 0}]
    assert [each.weight for each in read(*records, weight_field="w")] == [2.0, 0.5, 0.0]
    assert [each.weight for each in read(*records)] == [1.0] * 3
    pair = {"chosen": "a", "rejected": "b", "w": 3}
    assert [each.weight for each in read(pair, weight_field="w")] == [3.0, 1.0]
    labeled = {"prompt": "a", "completion": "b", "label": False, "w": 3}
    assert [each.weight for each in read(labeled, weight_field="w")] == [-3.0, 1.0]
    for wrong in (-1, math.nan, math.inf, True, "2", 10**400):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: field 'w' is .*finite number, at least 0"):
            list(read(records[0], {"text": "a", "w": wrong}, weight_field="w"))
    with pytest.raises(ValueError, match=r"line 1: no field 'weight'"):
        list(read(records[0], weight_field="weight"))


def test_preferences_of_text(read):
    source = read({"prompt": "p", "chosen": "c", "rejected": "r"})
    expected = [(("p\n", False, False), (answer, True, False)) for answer in "cr"]
    assert halves(source) == expected
    assert (next(iter(source)).takes_end, source.find_form().pairs, source.find_form().chat_template) == (
        True,
        True,
        "",
    )
    assert source.describe() == "a.jsonl, {documents} documents (prompt → chosen | rejected)"
    assert (
        halves(read({"a": "p", "b": "c", "c": "r"}, fields=["a", "b", "c"])) == expected
    )  # three names: a preference
    without = read({"a": "c", "b": "r"}, fields=["a", "b"], format="preference")
    assert halves(without) == [((answer, True, False),) for answer in "cr"]


def test_what_has_nothing_to_learn_is_counted(read):
    silent = {"role": "assistant", "content": " "}
    source = read(
        {"messages": [USER, ANSWER]}, {"messages": [USER]}, {"messages": []}, {"messages": [USER, silent]}
    )
    assert len(list(source)) == 1
    assert source.noted.skipped == {"conversations without an answer": 3}
    source = read(
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [silent]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER]},
    )
    assert len(list(source)) == 2
    assert source.noted.skipped == {"pairs with an empty answer": 2, "pairs of equal answers": 1}
    source = read(
        {"prompt": "p", "chosen": "", "rejected": "r"}, {"prompt": "p", "chosen": "a", "rejected": "a"}
    )
    assert list(source) == []
    assert source.noted.skipped == {"pairs with an empty answer": 1, "pairs of equal answers": 1}


# --- text as turns, and Alpaca's prompt ----------------------------------------------------------------------


def test_text_becomes_turns_with_as_chat(read):
    asked, pair = (
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
    )
    (as_text,) = read(asked)
    assert text(as_text.parts) == "Hi\nHello"
    assert as_text.takes_end
    source = read(asked, as_chat=True)
    (chat,) = source
    (written,) = read({"messages": [USER, ANSWER]})
    assert chat.parts == written.parts
    assert not chat.takes_end
    assert source.describe().endswith("(prompt → completion, chatml)")
    chosen, rejected = read(pair, as_chat=True)
    messages = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}
    assert halves([chosen, rejected]) == halves(read(messages))
    with pytest.raises(ValueError, match="leave it out"):
        list(read({"text": "a"}, as_chat=True))


def test_system_messages_are_left_out(read):
    records = [{"messages": [SYSTEM, USER, ANSWER]}, {"messages": [USER, ANSWER]}]
    first, second = read(*records, drop_system=True)
    assert first.parts == second.parts
    identities = {read(*records, **more).identity for more in ({}, {"drop_system": True})}
    assert len(identities) == 2
    pair = {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [OTHER]}
    assert not any("nice" in text(each.parts) for each in read(pair, drop_system=True))
    with pytest.raises(ValueError, match=r"data.drop_system=true is for messages"):
        list(read({"text": "a"}, drop_system=True))


def test_alpaca_records(read):
    short, whole = (
        {"instruction": "Add.", "output": "3"},
        {"instruction": "{Add}", "input": "1 2", "output": "3"},
    )
    empty = {**whole, "input": " "}
    documents = list(read(short, whole, empty, {**whole, "output": ""}, format="alpaca"))
    assert halves(documents[:2]) == halves(read(short, whole))  # found by the fields of the first record
    assert [text(document.parts, targets=True) for document in documents] == ["3"] * 3
    without, with_input = (text(document.parts) for document in documents[:2])
    assert without == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Response:\n3"
    )
    assert with_input == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
        " response that appropriately completes the request.\n\n"
        "### Instruction:\n{Add}\n\n### Input:\n1 2\n\n### Response:\n3"
    )
    assert "Input" not in text(documents[2].parts)
    named = {"ask": "{Add}", "on": "1 2", "out": "3"}
    (renamed,) = read(named, format="alpaca", fields=["ask", "on", "out"])
    assert text(renamed.parts) == with_input
    (chat,) = read(whole, as_chat=True)
    assert "user\n{Add}\n\n1 2<|im_end|>" in text(chat.parts)


def nested(depth):
    """A list of lists in JSON."""
    return "[" * depth + "1" + "]" * depth


MALFORMED = [
    ({"messages": "Hi"}, "field 'messages' is a str, not a list of messages"),
    ({"messages": [3]}, r"messages\[0\] is a int, not a message"),
    ({"messages": [USER, {"content": "a"}]}, r"messages\[1\] has neither `role` nor `from` \(content\)"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "role 'robot'; known are system, "),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "role "),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] is a NoneType, not text"),
    ({"messages": [{"role": "user", "content": 3}]}, "is a int, not text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "holds 'image_url'; only 'text' can be trained on",
    ),
    ({"messages": [USER, ANSWER], "tools": "x"}, "field 'tools' is text, but not a list in JSON"),
    ({"messages": [USER, ANSWER], "tools": 3}, "field 'tools' is a int"),
    ({"messages": [USER, ANSWER], "tools": nested(100_000)}, "field 'tools' is text, but not a list in JSON"),
    ({"messages": [USER, ANSWER], "tools": nested(600)}, "nested more than 100 levels"),
    ({"messages": [USER, {**ANSWER, "more": json.loads(nested(150))}]}, "nested more than 100 levels"),
    ({"messages": [USER, {**ANSWER, "content": "\ud800"}]}, "unpaired surrogate"),
    ({"message": []}, "no field 'messages'"),
]


def test_malformed_conversations_are_named_by_file_and_line(read):
    for record, complaint in MALFORMED:
        with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: .*{complaint}"):
            list(read({"messages": [USER, ANSWER]}, record))
        skipping = read({"messages": [USER, ANSWER]}, record, {"messages": [USER, OTHER]}, broken="skip")
        assert (len(list(skipping)), skipping.noted.skipped) == (2, {"broken lines": 1})
    contradiction = {"prompt": "other", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    for record, fields, complaint in (
        (contradiction, {}, r"chosen is a whole conversation .*data\.fields=\[chosen,rejected\]"),
        ({"text": "a"}, {"chat_template": "llama3"}, r"data\.chat_template=llama3 is for messages"),
    ):
        with pytest.raises(ValueError, match=rf"line 1: {complaint}"):
            list(read(record, **fields))


def test_content_may_be_a_list_of_texts_and_calls_need_none():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    texts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert read_messages([texts, call]) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    ]
    assert without_nulls({"a": None, "b": [{"c": None, "d": [None, 1]}]}) == {"b": [{"d": [None, 1]}]}


def test_the_identity_depends_on_form_and_template(config, text_file):
    chat, pair = {"messages": [USER, ANSWER]}, {"prompt": "p", "chosen": "c", "rejected": "r"}
    paths = [text_file(json.dumps(record), f"{number}.jsonl") for number, record in enumerate((chat, pair))]

    def identity(number, **fields):
        return Source(config(source="jsonl", path=paths[number], **fields)).identity

    found = [
        identity(0),
        identity(0, chat_template="llama3"),
        identity(0, chat_template="plain"),
        identity(1),
        identity(1, between=""),
        identity(1, fields=["chosen", "rejected"], format="preference"),
    ]
    assert len(set(found)) == len(found)
    assert identity(0) == found[0] == identity(0, chat_template="chatml")
    empty = Source(config(source="jsonl", path=text_file("", "empty.jsonl")))
    assert (empty.find_form().special_tokens, empty.find_form().pairs, empty.find_form().chat_template) == (
        (),
        False,
        "",
    )


# --- many conversations at once --------------------------------------------------------------------------

HOSTILE = """
{%- for m in messages -%}
    {%- if m.content == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
    {%- elif m.content == 'large' %}{{ 'x' * 10 ** 10 }}
    {%- elif m.content == 'refused' %}{{ raise_exception('no such turn') }}{% endif -%}
    <{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
    {%- else %}{{ m.content }}{% endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "unmarked"])
def test_conversations_written_together_are_those_written_one_by_one(
    config, text_file, monkeypatch, tmp_path, marks
):
    monkeypatch.setattr(chat_sandbox, "MOST_SECONDS", 0.1)
    template = tmp_path / "mine.jinja"
    unmarked = HOSTILE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    unmarked += "{% if add_generation_prompt %}<assistant>{% endif %}"
    template.write_text(HOSTILE if marks else unmarked)
    said = [f"é<user>{number}" for number in range(70)]
    said[9:40:10] = ["refused", "endless", "large", "refused"]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}, ANSWER]}) + "\n" for text in said]
    lines[5:5] = ["\n", "{\n", '{"messages": [{"role": "user", "content": ' + '"x"}]}\n', '{"id": 1}\n']
    path, asked, ask = text_file("".join(lines), "a.jsonl"), [], chat_sandbox._Process.ask
    monkeypatch.setattr(
        chat_sandbox._Process, "ask", lambda *given: asked.append(len(given[2])) or ask(*given)
    )

    def all_of(**fields):
        del asked[:]
        data = config(
            source="jsonl", path=path, chat_template=str(template), special_tokens=["<user>"], **fields
        )
        source = Source(data)
        return list(source), source.noted, source.fault

    def refusal():
        with pytest.raises(
            ValueError, match=r"a\.jsonl, line 7: not JSON.*: a\.jsonl:7, 9, 14, 24"
        ) as refused:
            all_of()
        return str(refused.value)

    together, error = all_of(broken="skip"), refusal()
    assert max(asked) > 20
    assert len(asked) < 50 or not marks
    assert len(together[0]) == 66
    assert together[1].skipped == {"blank lines": 1, "broken lines": 6, "conversations without an answer": 1}
    monkeypatch.setattr(room, "MOST_RECORDS", 1)
    assert all_of(broken="skip") == together
    assert refusal() == error


def test_records_before_a_fault_of_their_file_come_first(read):
    reader = read({"messages": [USER, ANSWER]}).reader

    def entries():
        yield {"messages": [USER, ANSWER]}, "a:1", "a, line 1"
        raise OSError("the file ends here")

    found = reader.documents(entries(), "lines")
    assert next(found).name == "a:1"
    with pytest.raises(OSError, match="ends here"):
        next(found)
