"""A record → a document: the same for every file or table that records come from.

    text         {"text": …}
    completion   {"prompt": …, "completion": …}                       text, or messages
    chat         {"messages": [{"role": …, "content": …}, …]}         or ShareGPT's `conversations`; optional `tools`
    preference   {"prompt": …, "chosen": …, "rejected": …}            text, or messages (also before them)

`data.fields` gives other names to these fields. The first record decides what all of them are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from multipack.data.data_config import DataConfig
from multipack.data.messages import Message, read_messages, read_tools, says_something
from multipack.data.source import Part, SourceDocument

if TYPE_CHECKING:
    from multipack.data.chat import ChatTemplate

Form = Literal["text", "completion", "chat", "preference"]
CONVERSATIONS = ("messages", "conversations")
KNOWN_FIELDS = ("text", "prompt", "completion", *CONVERSATIONS, "chosen", "rejected")
"""What is read without `data.fields`."""
_LEAST_FIELDS = (
    {"text"},
    {"prompt", "completion"},
    *({name} for name in CONVERSATIONS),
    {"chosen", "rejected"},
)
"""Without one of these nothing can be made of a record."""


@dataclass(frozen=True)
class Shape:
    """What the records of a source are.

    Attributes:
        form: text, completion, chat or preference.
        fields: the names of its fields: text; prompt, completion; messages; or context, chosen, rejected, where the
            context may be missing.
        is_chat: whether there are messages, for a template to write.
        tools: the field of the tools that may be called, which any record may lack.
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
    """Reads records of one shape.

    Args:
        config: `format`, `fields` and `between` say how.
        template: opens the template of chats, when the first of them is met.

    Attributes:
        shape: of the records; None before the first.
        template: of chats; None before the first, and where there are none.
    """

    def __init__(self, config: DataConfig, template: Callable[[], ChatTemplate]) -> None:
        self._config, self._open_template = config, template
        self.shape: Shape | None = None
        self.template: ChatTemplate | None = None

    def columns(self, names: Iterable[str]) -> list[str]:
        """Those of a table's columns that are read; all, if a field is missing, so that an error can name them."""
        names = list(names)
        given = self.shape.fields if self.shape is not None else self._config.fields
        if not any(fields <= {*names} for fields in ([{*given}] if given else _LEAST_FIELDS)):
            return names
        wanted = {*(self._config.fields or KNOWN_FIELDS), "tools", "system"}
        return [name for name in names if name in wanted]

    def begin(self, record: dict[str, Any], where: str) -> Shape:
        """Let the first record decide what all are.

        Raises:
            ValueError: it has none of the fields that are known; settings of chats, but no messages.
        """
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

    def document(self, record: dict[str, Any], name: str, where: str) -> SourceDocument | str:
        """The document of a record, or the reason for which it is left out.

        Args:
            record: field → value.
            name: of the document.
            where: file and line, for errors.

        Raises:
            ValueError: the record lacks a field, or holds something else in it.
        """
        shape = self.shape or self.begin(record, where)
        if shape.form == "chat":
            return self._chat(record, name, where, shape)
        if shape.form == "preference":
            return self._pair(record, name, where, shape)
        if shape.is_chat:
            return self._answer(record, name, where, shape)
        texts = [_text(record, field, where) for field in shape.fields]
        if not texts[-1].strip():
            return "empty documents" if len(texts) == 1 else "empty completions"
        if len(texts) == 1:
            return SourceDocument(name, (Part(texts[0], True),))
        return SourceDocument(name, (self._prompt(texts[0]), Part(texts[1], True)))

    def _prompt(self, text: str) -> Part:
        return Part(text + self._config.between, False)

    def _chat(self, record: dict[str, Any], name: str, where: str, shape: Shape) -> SourceDocument | str:
        field = shape.fields[0]
        messages = _with_system(read_messages(_field(record, field, where), where, field), record, where)
        if not any(map(says_something, messages)):
            return "conversations without an answer"
        return SourceDocument(name, self._parts(messages, record, where, shape), closed=True)

    def _answer(self, record: dict[str, Any], name: str, where: str, shape: Shape) -> SourceDocument | str:
        """A prompt of messages, and a completion of messages."""
        context = self._context(record, shape.fields[0], where)
        answer = read_messages(_field(record, shape.fields[1], where), where, shape.fields[1], "assistant")
        if not any(map(says_something, answer)):
            return "empty completions"
        return SourceDocument(
            name, self._parts(context + answer, record, where, shape, len(context)), closed=True
        )

    def _pair(self, record: dict[str, Any], name: str, where: str, shape: Shape) -> SourceDocument | str:
        *prompt, chosen, rejected = shape.fields
        if not shape.is_chat:
            begin = tuple(self._prompt(_text(record, field, where)) for field in prompt)
            texts = [_text(record, field, where) for field in (chosen, rejected)]
            if not all(text.strip() for text in texts):
                return "pairs with an empty answer"
            if texts[0] == texts[1]:
                return "pairs of equal answers"
            halves = [(*begin, Part(text, True)) for text in texts]
        else:
            context = self._context(record, prompt[0], where) if prompt else []
            answers = [
                read_messages(_field(record, field, where), where, field, "assistant")
                for field in (chosen, rejected)
            ]
            if answers[0] == answers[1]:
                return "pairs of equal answers"
            context, answers = _divide(context, answers, where, shape)
            if not all(any(map(says_something, answer)) for answer in answers):
                return "pairs with an empty answer"
            halves = [self._parts(context + answer, record, where, shape, len(context)) for answer in answers]
        return SourceDocument(name, halves[0] + halves[1], closed=shape.is_chat, border=len(halves[0]))

    def _context(self, record: dict[str, Any], field: str, where: str) -> list[Message]:
        messages = read_messages(_field(record, field, where), where, field, "user")
        return _with_system(messages, record, where)

    def _parts(
        self, messages: list[Message], record: dict[str, Any], where: str, shape: Shape, first_target: int = 0
    ) -> tuple[Part, ...]:
        assert self.template is not None  # `begin` opened it
        tools = read_tools(record.get(shape.tools), where, shape.tools)
        return self.template.parts(messages, tools, where, first_target=first_target)


def _shape(config: DataConfig, record: dict[str, Any], where: str) -> Shape:
    form = config.format if config.format != "auto" else _form(config.fields, record, where)
    fields = tuple(config.fields) or _default_fields(form, record)
    if form == "chat":
        return Shape(form, fields[:1], True, *fields[1:])
    is_chat = form != "text" and any(isinstance(record.get(name), list | dict) for name in fields)
    return Shape(form, fields, is_chat)


def _form(fields: list[str], record: dict[str, Any], where: str) -> Form:
    """What a record is, by the number of names that were given, or else by the fields that it has."""
    if fields:
        if len(fields) > 1:
            return "completion" if len(fields) == 2 else "preference"
        return "chat" if isinstance(record.get(fields[0]), list) else "text"
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
        f"fields ({', '.join(record) or 'none'}); name those that are meant in data.fields"
    )


def _default_fields(form: Form, record: dict[str, Any]) -> tuple[str, ...]:
    if form == "text":
        return ("text",)
    if form == "completion":
        return ("prompt", "completion")
    conversation = [name for name in CONVERSATIONS if name in record][:1]
    if form == "chat":
        return tuple(conversation or ["messages"])
    context = ["prompt"] if "prompt" in record else conversation
    return (*context, "chosen", "rejected")


def _divide(
    context: list[Message], answers: list[list[Message]], where: str, shape: Shape
) -> tuple[list[Message], list[list[Message]]]:
    """Context and answers, where the answers may be whole conversations that begin alike."""
    if all(answer and answer[0]["role"] == "assistant" for answer in answers):
        return context, answers
    first, second = answers
    alike = next(
        (number for number, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
    if context and first[: len(context)] != context:
        raise ValueError(
            f"{where}: {shape.fields[-2]} is a conversation of its own, which does not begin with {shape.fields[0]}; "
            f"give data.fields=[{shape.fields[-2]},{shape.fields[-1]}] alone"
        )
    return first[:alike], [answer[alike:] for answer in answers]


def _with_system(messages: list[Message], record: dict[str, Any], where: str) -> list[Message]:
    """`messages` after the field `system` of the record, where there is one and they have none of their own."""
    system = record.get("system")
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": _text(record, "system", where)}, *messages]


def _field(record: dict[str, Any], field: str, where: str) -> Any:
    if field not in record:  # as in tables' rows where it is null
        raise ValueError(f"{where}: no field {field!r}, or null in it (it has {', '.join(record) or 'none'})")
    return record[field]


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = _field(record, field, where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: field {field!r} holds half a surrogate pair: {error}") from error
    return value
