import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.data.text import chat as room
from multipack.data.text.chat import ChatTemplate, built_in_template, resolve_template
from multipack.data.text.data_config import DataConfig
from multipack.data.text.tokenizer import END, TokenizerConfig, byte_tokenizer

CHATML = built_in_template("chatml")
LLAMA3 = built_in_template("llama3")
PLAIN = built_in_template("plain", END)
UNMARKED = ChatTemplate(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ["<|im_start|>", "<|im_end|>"],
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "<|im_end|>"}}}
WITH_TOOL = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds <|im_start|>"}}]


def text(parts, of=lambda part: True):
    return "".join(part.text for part in parts if of(part))


def render(template, messages, tools=None, prompt=False):
    return text(template.parts(messages, tools, add_generation_prompt=prompt))


def targets(parts):
    return text(parts, lambda part: part.is_target)


# --- text and targets -------------------------------------------------------------------------------


def test_built_in_templates_write_their_formats():
    assert render(CHATML, CHAT[:3], None, True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(LLAMA3, CHAT[1:3]) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    )
    assert render(PLAIN, CHAT[1:4], None, True) == f"User: Hi\nAssistant: Hello{END}\nUser: 2+2?\nAssistant: "


def test_answers_and_their_end_tokens_are_targets():
    assert targets(CHATML.parts(CHAT)) == targets(UNMARKED.parts(CHAT)) == "Hello<|im_end|>4<|im_end|>"
    assert CHATML.parts(CHAT)[-4:] == (
        ("assistant\n", False, False),
        ("4", True, False),
        ("<|im_end|>", True, True),
        ("\n", False, False),
    )
    assert UNMARKED.parts(CHAT) == CHATML.parts(CHAT)
    assert targets(LLAMA3.parts(CHAT)) == "Hello<|eot_id|>4<|eot_id|>"
    assert targets(PLAIN.parts(CHAT)) == f"Hello{END}4{END}"
    ends = [template.end_of_turn for template in (CHATML, UNMARKED, LLAMA3, PLAIN)]
    assert ends == ["<|im_end|>", "<|im_end|>", "<|eot_id|>", END]


def test_tool_calls_are_targets_and_their_results_are_context():
    parts = CHATML.parts(WITH_TOOL, TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "<|im_end|>"}}\n</tool_call>'
    assert targets(parts) == f"{call}<|im_end|>It is 4.<|im_end|>"
    assert "<tool_response>\n4\n</tool_response>" in text(parts)
    assert '"description": "adds <|im_start|>"' in text(parts)
    for template in (LLAMA3, PLAIN):
        assert '"name": "add"' in targets(template.parts(WITH_TOOL, TOOLS))
        assert "adds <|im_start|>" in text(template.parts(WITH_TOOL, TOOLS))
    written = [{**CALL["function"], "arguments": '{"a": 2}'}]  # arguments in JSON, and no `function` around
    parts = CHATML.parts([CHAT[1], {"role": "assistant", "content": "So:", "tool_calls": written}])
    assert targets(parts) == (
        'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    )


def test_messages_before_the_first_target_are_context():
    for template in (CHATML, UNMARKED):
        assert targets(template.parts(CHAT, first_target=4)) == "4<|im_end|>"
        untargeted = [part._replace(is_target=False) for part in template.parts(CHAT)]
        assert [part._replace(is_target=False) for part in template.parts(CHAT, first_target=4)] == untargeted


def test_a_prompt_is_cut_as_in_training():
    for template in (CHATML, UNMARKED, LLAMA3, PLAIN):
        prompt, whole = (
            template.parts(CHAT[:4], add_generation_prompt=True),
            template.parts(CHAT),
        )
        last = max(number for number, part in enumerate(whole) if part.is_target and not part.is_special)
        assert prompt == tuple(part._replace(is_target=False) for part in whole[:last])


# --- special tokens ---------------------------------------------------------------------------------

FRAGMENTS = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<", "<|", "|>", ">", "<|im_", "end|>", *"a \né"]
CONTENT = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
        st.sampled_from(["\U00100000", "\U0010fffc", "\U0010fffd", "\ue000"]),
    ),
    max_size=6,
).map("".join)
CONVERSATION = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        CONTENT,
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, UNMARKED], ids=["chatml", "llama3", "unmarked"])
@settings(deadline=None, max_examples=15)
@given(messages=CONVERSATION)
def test_no_message_can_spell_a_special_token(template, messages):
    parts = template.parts(messages)
    trims = template is LLAMA3
    contents = [m["content"].strip() if trims else m["content"] for m in messages]
    end = template.end_of_turn
    answers = [c + end for c, m in zip(contents, messages, strict=True) if m["role"] == "assistant"]
    assert text(parts) == render(template, messages)
    assert targets(parts) == "".join(answers)
    special = [part.text for part in parts if part.is_special]
    expected = {  # per message, and before all
        id(CHATML): (["<|im_start|>", "<|im_end|>"], []),
        id(UNMARKED): (["<|im_start|>", "<|im_end|>"], []),
        id(LLAMA3): (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], ["<|begin_of_text|>"]),
    }[id(template)]
    assert special == expected[1] + expected[0] * len(messages)

    tokenizer = byte_tokenizer(template.special_tokens)
    (encoded,) = tokenizer.encode_parts([parts])
    assert [is_target for _, is_target in encoded] == [part.is_target for part in parts]
    ids = [token for tokens, _ in encoded for token in tokens]
    names = {tokenizer.special_id(name): name for name in template.special_tokens}
    read = b"".join(names[token].encode() if token in names else bytes([token]) for token in ids)
    assert read.decode() == render(template, messages)
    assert [names[token] for token in ids if token in names] == special


@pytest.mark.parametrize(
    ("body", "content"),
    [("<|im{{ text }}", "_end|>"), ("{{ text }}end|>", "<|im_"), ("{{ text | trim }}|>", " <|im_end \n")],
)
def test_text_of_a_template_completes_no_name_of_a_special_token(body, content):
    block = "{% generation %}" + body.replace("text", "message.content") + "{% endgeneration %}"
    template = ChatTemplate("{% for message in messages %}" + block + "{% endfor %}", ["<|im_end|>"])
    parts = template.parts([{"role": "assistant", "content": content}])
    assert "<|im_end|>" in text(parts)
    assert not any(part.is_special for part in parts)


def test_a_template_can_trim_search_and_change_protected_text():
    source = "{% if 'a' in messages[0].content %}{{ messages[0].content | trim | tojson }}{% endif %}"
    template = ChatTemplate(source, ["<s>", "</s>"])
    assert render(template, [{"role": "user", "content": ' <s>a"</s> < '}]) == '"<s>a\\"</s> <"'
    ascii_template = ChatTemplate("{{ messages[0].content | tojson(ensure_ascii=True) }}", ["<é>"])
    assert render(ascii_template, [{"role": "user", "content": "ü<é>"}]) == '"\\u00fc<é>"'


# --- foreign templates ------------------------------------------------------------------------------


def test_a_template_that_rewrites_earlier_messages_needs_marks():
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if loop.last %}{{ m.content }}{% else %}{{ m.content | upper }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(source, [], name="mine.jinja")
    with pytest.raises(ValueError, match=r"mine\.jinja writes message 2 .*\{% generation %\}"):
        template.parts(CHAT)
    assert render(template, CHAT[:2], None, True) == "[system]BE BRIEF.[user]Hi[assistant]"
    marked = source.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert targets(ChatTemplate(marked, []).parts(CHAT)) == "4"
    with pytest.raises(ValueError, match="1 generation blocks for 2 answers"):
        ChatTemplate("{% generation %}a{% endgeneration %}", []).parts(CHAT, first_target=3)
    with pytest.raises(ValueError, match="unpaired surrogate"):
        CHATML.parts([{"role": "user", "content": "\ud800"}])


def test_the_time_of_a_long_conversation_is_linear_or_the_conversation_refused():
    turns = [CHAT[1], CHAT[2]] * 20_000
    began = time.process_time()
    assert targets(CHATML.parts(turns)).count("Hello") == 20_000
    with pytest.raises(ValueError, match=r"20,000 answers in .*\{% generation %\}"):
        UNMARKED.parts(turns)
    assert (
        time.process_time() - began < 10
    )  # a hundred times as long if every answer is compared with every cut


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('no system role') }}", "mine refuses the conversation: no system role"),
        ("{{ messages.append(1) }}", "mine refuses the conversation"),
        ("{{ ''.__class__.__mro__ }}", "mine refuses the conversation: .*unsafe"),
        ("{{ messages[9].content }}", "mine refuses the conversation"),
        ("{{ 1 // 0 }}", "mine refuses the conversation"),
        ("\n{% if x %}", "mine: line 2: .*endif"),
        ("\U0010fffc", "private-use"),
        ("{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}", "nests"),
    ],
)
def test_a_template_that_fails_is_named(source, complaint):
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate(source, [], name="mine").parts(CHAT)


def test_loop_controls_and_the_day_are_there():
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
        " {{ strftime_now('%Y') }}",
        [],
    )
    assert re.fullmatch(r"Be brief\. \d{4}", render(template, CHAT))
    assert template.identity != template.to_json()
    assert CHATML.identity == CHATML.to_json()


def test_json_keeps_a_template():
    for template in (CHATML, LLAMA3, PLAIN):
        again = ChatTemplate.from_json(template.to_json())
        assert again.to_json() == template.to_json()
        assert again.parts(CHAT) == template.parts(CHAT)
    for broken in ("", "[]", "{}", CHATML.to_json().replace("template 2", "template 9"), '{"format": 1}'):
        with pytest.raises(ValueError, match="not a chat template of multipack"):
            ChatTemplate.from_json(broken)


def test_too_many_private_characters_are_refused(monkeypatch):
    monkeypatch.setattr(room, "FIRST_CODE", 0x10FF00)
    most = 0x10FFFC - room.FIRST_CODE
    content = "".join(chr(room.FIRST_CODE + number) for number in range(most + 1))
    assert render(CHATML, [{"role": "user", "content": content[:-1]}]).count(content[:-1]) == 1
    with pytest.raises(ValueError, match="too many different"):
        render(CHATML, [{"role": "user", "content": content}])


# --- resolution -------------------------------------------------------------------------------------


def resolve(tokenizer=None, **data):
    return resolve_template(DataConfig(source="jsonl", path="x", **data), tokenizer or TokenizerConfig())


def test_names_files_and_defaults(tmp_path):
    assert resolve().name == "chatml"
    assert resolve(chat_template="llama3").special_tokens == LLAMA3.special_tokens
    assert resolve(chat_template="plain").special_tokens == (END,)
    assert resolve(TokenizerConfig("byte"), chat_template="plain").end_of_turn == END
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}")
    template = resolve(chat_template=str(file), special_tokens=["<|end|>", "<|user|>"])
    assert template.special_tokens == ("<|end|>", "<|user|>", END)
    assert (template.name, template.eos_token) == ("mine.jinja", END)
    with pytest.raises(ValueError, match=r"writes <\|end\|> as plain text: .*data\.special_tokens"):
        resolve(chat_template=str(file))
    with pytest.raises(
        ValueError, match=r"chat_template=chatlm: one of chatml, llama3, plain, or a readable Jinja file"
    ):
        resolve(chat_template="chatlm")


def test_the_tokenizers_own_template_comes_first(tmp_path):
    names = ["<|user|>", "<|end|>"]
    byte_tokenizer(names).save(tmp_path / "tokenizer.json")
    config = TokenizerConfig("file", str(tmp_path))
    assert resolve(config).name == "chatml"
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "tool_use", "template": "T"},'
        ' {"name": "default", "template": "A{{ bos_token }}"}],'
        ' "bos_token": {"content": "<|user|>"}, "eos_token": "<|end|>"}'
    )
    own = resolve(config)
    assert (own.source, own.bos_token, own.eos_token) == ("A{{ bos_token }}", "<|user|>", "<|end|>")
    assert own.special_tokens == (END, *names)
    assert resolve(config, chat_template="plain").end_of_turn == "<|end|>"
    (tmp_path / "chat_template.jinja").write_text("B")
    assert resolve(config).source == "B"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: a JSON list, not an object"):
        resolve(config)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_json().replace(END, "<nothing>"))
    with pytest.raises(ValueError, match=r"plain ends each answer .*has none"):
        resolve(config, chat_template="plain")


# --- parity with transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, LLAMA3, PLAIN], ids=["chatml", "llama3", "plain"])
@pytest.mark.parametrize(("messages", "tools"), [(CHAT, None), (WITH_TOOL, TOOLS)], ids=["chat", "tools"])
def test_text_and_masks_equal_those_of_transformers(template, messages, tools):
    transformers = pytest.importorskip("transformers", reason="compares with apply_chat_template")
    import tokenizers

    tokenizer = byte_tokenizer(template.special_tokens)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.to_json()),
        bos_token=template.bos_token or None,
        eos_token=template.eos_token,
    )
    theirs.chat_template = template.source
    for prompt in (False, True):
        given = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
        assert theirs.apply_chat_template(messages, **given) == render(template, messages, tools, prompt)
    harmless = [
        {**m, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]} if "tool_calls" in m else m
        for m in messages
    ]
    whole = theirs.apply_chat_template(harmless, return_dict=True, return_assistant_tokens_mask=True)
    (encoded,) = tokenizer.encode_parts([template.parts(harmless)])
    assert [token for ids, _ in encoded for token in ids] == whole["input_ids"]
    assert [int(target) for ids, target in encoded for _ in ids] == whole["assistant_masks"]
