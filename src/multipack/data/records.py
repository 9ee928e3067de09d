"""Records → documents, for every file format or table.

    text         {"text": …}
    completion   {"prompt": …, "completion": …}                       text, or messages
    chat         {"messages": [{"role": …, "content": …}, …]}         or ShareGPT's `conversations`; optional `tools`
    preference   {"prompt": …, "chosen": …, "rejected": …}            text, or messages (also as the context)

`data.fields` gives other names to these fields. The first record decides the form of all of them. Messages are read in
two notations, which may be mixed:

    {"role": "user", "content": "Hi"}      content may be a list of {"type": "text", "text": …}
    {"from": "human", "value": "Hi"}       ShareGPT's, whose `human` and `gpt` are user and assistant
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from multipack.data.data_config import DataConfig
from multipack.data.texts import SourceDocument, TextPart

Form = Literal["text", "completion", "chat", "preference"]
Message = dict[str, Any]
"""`role`, `content` (text), and other entries that a template may read: `tool_calls`, `tool_call_id`, `name`, …"""
CONVERSATIONS = ("messages", "conversations")
KNOWN_FIELDS = ("text", "prompt", "completion", *CONVERSATIONS, "chosen", "rejected")
"""Fields that are read without `data.fields`."""
REQUIRED_FIELDS = (
    {"text"},
    {"prompt", "completion"},
    {"messages"},
    {"conversations"},
    {"chosen", "rejected"},
)
"""A record has all fields of one of these sets."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


@dataclass(frozen=True)
class Shape:
    """The form of the records of a source.

    Attributes:
        form: text, completion, chat or preference.
        fields: names of the fields in order: text; prompt, completion; messages; or context, chosen, rejected, where
            the context may be missing.
        is_chat: whether the fields hold messages, which a template renders.
        tools: name of the field of callable tools, which a record may lack.
    """

    form: Form
    fields: tuple[str, ...]
    is_chat: bool
    tools: str = "tools"

    def __str__(self) -> str:
        if self.form == "preference":
            return " → ".join([*self.fields[:-2], " | ".join(self.fields[-2:])])
        return " → ".join(self.fields)


class RecordReader:
    """Makes documents of the records of one source.

    Args:
        config: `format`, `fields`, `between` and `chat_template` are read.
        open_template: opens the `ChatTemplate` when the first record holds messages.

    Attributes:
        shape: form of the records; None before the first record.
        template: the `ChatTemplate`; None before the first record, and without messages.
    """

    def __init__(self, config: DataConfig, open_template: Callable[[], Any]) -> None:
        self._config, self._open_template = config, open_template
        self.shape: Shape | None = None
        self.template: Any = None

    def columns(self, names: Iterable[str]) -> list[str]:
        """The columns of a table that are read; all of them if a field is missing, so that the error can list them."""
        names = list(names)
        fields = self.shape.fields if self.shape is not None else tuple(self._config.fields)
        if not any(required <= {*names} for required in ([{*fields}] if fields else REQUIRED_FIELDS)):
            return names
        wanted = {*(self._config.fields or KNOWN_FIELDS), "tools", "system"}
        return [name for name in names if name in wanted]

    def documents(self, record: dict[str, Any], name: str, where: str) -> list[SourceDocument] | str:
        """The documents of a record, or the reason why it has none.

        Args:
            record: field → value.
            name: name of the document.
            where: file and line, for errors.

        Raises:
            ValueError: a field is missing or has another type; the first record has no known fields.
        """
        shape = self.shape or self._begin(record, where)
        if shape.form == "preference":
            return self._pair(record, name, where, shape)
        if shape.form == "chat":
            messages = self._messages(record, shape.fields[0], where)
            if not any(map(_is_answer, messages)):
                return "conversations without an answer"
            parts = self._render(messages, record, where)
            return [SourceDocument(name, parts, closed=True)]
        if shape.is_chat:
            context = self._messages(record, shape.fields[0], where, "user")
            answer = read_messages(
                _field(record, shape.fields[1], where), where, shape.fields[1], "assistant"
            )
            if not any(map(_is_answer, answer)):
                return "empty completions"
            parts = self._render(context + answer, record, where, len(context))
            return [SourceDocument(name, parts, closed=True)]
        *prompt, text = (_text(record, field, where) for field in shape.fields)
        if not text.strip():
            return "empty completions" if prompt else "empty documents"
        return [SourceDocument(name, (*self._prompt(prompt), TextPart(text, True)))]

    def _begin(self, record: dict[str, Any], where: str) -> Shape:
        shape = _shape(self._config, record, where)
        if shape.is_chat:
            self.template = self._open_template()
        elif self._config.chat_template:
            raise ValueError(
                f"{where}: data.chat_template={self._config.chat_template} is for messages, but this is {shape.form} "
                f"({shape}); leave it out, or name the field of the messages in data.fields, with data.format=chat"
            )
        self.shape = shape
        return shape

    def _pair(
        self, record: dict[str, Any], name: str, where: str, shape: Shape
    ) -> list[SourceDocument] | str:
        *context, chosen, rejected = shape.fields
        if shape.is_chat:
            prompt = self._messages(record, context[0], where, "user") if context else []
            answers = [
                read_messages(_field(record, field, where), where, field, "assistant")
                for field in (chosen, rejected)
            ]
            prompt, answers = _without_common(prompt, answers, where, shape)
            if answers[0] == answers[1]:
                return "pairs of equal answers"
            if not all(any(map(_is_answer, answer)) for answer in answers):
                return "pairs with an empty answer"
            halves = [self._render(prompt + answer, record, where, len(prompt)) for answer in answers]
        else:
            begin = self._prompt([_text(record, field, where) for field in context])
            texts = [_text(record, field, where) for field in (chosen, rejected)]
            if not all(text.strip() for text in texts):
                return "pairs with an empty answer"
            if texts[0] == texts[1]:
                return "pairs of equal answers"
            halves = [(*begin, TextPart(text, True)) for text in texts]
        return [SourceDocument(name, answer, closed=shape.is_chat) for answer in halves]

    def _prompt(self, texts: list[str]) -> tuple[TextPart, ...]:
        return tuple(TextPart(text + self._config.between, False) for text in texts)

    def _messages(self, record: dict[str, Any], field: str, where: str, role: str = "") -> list[Message]:
        """The messages of a field, after the record's field `system` unless they begin with a system message."""
        messages = read_messages(_field(record, field, where), where, field, role)
        if not record.get("system") or (messages and messages[0]["role"] == "system"):
            return messages
        return [{"role": "system", "content": _text(record, "system", where)}, *messages]

    def _render(
        self, messages: list[Message], record: dict[str, Any], where: str, first_target: int = 0
    ) -> tuple[TextPart, ...]:
        assert self.shape is not None
        tools = read_tools(record.get(self.shape.tools), where, self.shape.tools)
        parts: tuple[TextPart, ...] = self.template.parts(messages, tools, where, first_target=first_target)
        return parts


def _shape(config: DataConfig, record: dict[str, Any], where: str) -> Shape:
    form = config.format if config.format != "auto" else _form(config.fields, record, where)
    fields = tuple(config.fields) or _default_fields(form, record)
    if form == "chat":
        return Shape(form, fields[:1], True, *fields[1:])
    is_chat = form != "text" and any(isinstance(record.get(name), list | dict) for name in fields)
    return Shape(form, fields, is_chat)


def _form(fields: list[str], record: dict[str, Any], where: str) -> Form:
    """The form of a record: by the number of names in `data.fields`, or else by the fields that it has."""
    if len(fields) == 1:
        return "chat" if isinstance(record.get(fields[0]), list) else "text"
    if fields:
        return "completion" if len(fields) == 2 else "preference"
    if "chosen" in record and "rejected" in record:
        return "preference"
    if any(name in record for name in CONVERSATIONS):
        return "chat"
    if "text" in record:
        return "text"
    if "prompt" in record and "completion" in record:
        return "completion"
    raise ValueError(
        f"{where}: neither `text` nor `prompt` and `completion` nor `messages` nor `chosen` and `rejected` among the "
        f"fields ({', '.join(record) or 'none'}); name the fields to read in data.fields"
    )


def _default_fields(form: Form, record: dict[str, Any]) -> tuple[str, ...]:
    if form == "text":
        return ("text",)
    if form == "completion":
        return ("prompt", "completion")
    conversation = [name for name in CONVERSATIONS if name in record][:1]
    if form == "chat":
        return tuple(conversation or ["messages"])
    return (*(["prompt"] if "prompt" in record else conversation), "chosen", "rejected")


def _without_common(
    context: list[Message], answers: list[list[Message]], where: str, shape: Shape
) -> tuple[list[Message], list[list[Message]]]:
    """Context and answers; where the answers are whole conversations, their common beginning is the context."""
    if answers[0] == answers[1] or all(answer and answer[0]["role"] == "assistant" for answer in answers):
        return context, answers
    first, second = answers
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    if context and first[: len(context)] != context:
        raise ValueError(
            f"{where}: {shape.fields[-2]} is a whole conversation that does not begin with {shape.fields[0]}; "
            f"give data.fields=[{shape.fields[-2]},{shape.fields[-1]}] alone"
        )
    return first[:common], [answer[common:] for answer in answers]


def _field(record: dict[str, Any], field: str, where: str) -> Any:
    if field not in record:  # rows of tables lack fields that are null
        raise ValueError(f"{where}: no field {field!r}, or null in it (it has {', '.join(record) or 'none'})")
    return record[field]


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = _field(record, field, where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: field {field!r} contains an unpaired surrogate: {error}") from error
    return value


def _is_answer(message: Message) -> bool:
    """Whether an assistant's message has text or a tool call."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


# --- messages -----------------------------------------------------------------------------------------


def read_messages(value: Any, where: str, field: str = "messages", role: str = "") -> list[Message]:
    """The messages of one conversation in one notation: `role` and `content`.

    Args:
        value: a list of messages, one message, or text.
        where: file and line, for errors.
        field: the record's field, for errors.
        role: role of a `value` that is text; empty: text is an error.

    Raises:
        ValueError: an entry is no message, a role is unknown, or a content is not text.
    """
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}, not a list of messages")
    return [_message(message, where, f"{field}[{number}]") for number, message in enumerate(messages)]


def _message(value: Any, where: str, field: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {field} is a {type(value).__name__}, not a message with role and content")
    message = {key: entry for key, entry in value.items() if entry is not None}
    if "role" not in message and "from" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
    if "role" not in message:
        raise ValueError(
            f"{where}: {field} has neither `role` nor `from` ({', '.join(value) or 'it is empty'})"
        )
    role = message["role"]
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"{where}: {field} has the role {role!r}; known are {', '.join(ROLES)}")
    return {**message, "role": role, "content": _content(message, where, field)}


def _content(message: Message, where: str, field: str) -> str:
    """The text of a message; the entries of a list are joined."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    entries = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(entries, list):
        raise ValueError(f"{where}: the content of {field} is a {type(content).__name__}, not text")
    for entry in entries:
        if (
            not isinstance(entry, dict)
            or entry.get("type") != "text"
            or not isinstance(entry.get("text"), str)
        ):
            kind = entry.get("type") if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(f"{where}: the content of {field} holds {kind!r}; only 'text' can be trained on")
    return "".join(entry["text"] for entry in entries)


def read_tools(value: Any, where: str, field: str = "tools") -> list[Any] | None:
    """The tools of a conversation: a list of descriptions, or one in JSON; None if there are none.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"{where}: field {field!r} is text, but not a list in JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}, not a list of tools")
    return value


def without_nulls(value: Any) -> Any:
    """`value` without dictionary entries that are None, at any depth.

    Tables have every field in every row, such as `tool_calls: None` in each message without a call; templates ask
    whether a message *has* tool calls.
    """
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
