"""Records → documents, for every file format or table.

    text         {"text": …}
    completion   {"prompt": …, "completion": …}                       text, or messages
    alpaca       {"instruction": …, "input": …, "output": …}          text, in Alpaca's prompt; `input` may be missing
    chat         {"messages": [{"role": …, "content": …}, …]}         or ShareGPT's `conversations`; optional `tools`
    label        {"prompt": …, "completion": …, "label": true}        text, or messages; whether the answer is desirable
    preference   {"prompt": …, "chosen": …, "rejected": …}            text, or messages (also as the context)

`data.fields` gives other names to these fields, and `data.weight_field` names one with the document's weight in the
loss. A labeled answer becomes two documents: it, and after the same prompt the answer of the record before (for the
first record its own), from which KTO estimates a divergence. The first record decides the form of all of them. With
`data.as_chat` text becomes messages: the prompt one of the user, the answer one of the assistant. Messages are read in
two notations, which may be mixed:

    {"role": "user", "content": "Hi"}      content may be a list of {"type": "text", "text": …}
    {"from": "human", "value": "Hi"}       ShareGPT's, whose `human` and `gpt` are user and assistant
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Any, Literal, NamedTuple

from multipack.data.text.data_config import DataConfig
from multipack.data.text.skipped import Noted
from multipack.data.text.texts import BrokenRecord, Found, Message, Skip, SourceDocument, TextPart

Form = Literal["text", "completion", "alpaca", "chat", "preference", "label"]
ALPACA_FIELDS = ("instruction", "input", "output")
FORMS: tuple[tuple[Form, tuple[str, ...]], ...] = (
    ("preference", ("chosen", "rejected")),
    ("chat", ("messages",)),
    ("chat", ("conversations",)),
    ("text", ("text",)),
    ("label", ("prompt", "completion", "label")),
    ("completion", ("prompt", "completion")),
    ("alpaca", ALPACA_FIELDS),
    ("alpaca", ("instruction", "output")),
)
"""Form of a record that has all of these fields; the first match counts, and `label` must be true or false. A
preference may have a context too."""
CONTEXTS = ("prompt", "messages", "conversations")
"""Fields that may hold the context of a preference."""
WITHOUT_ANSWER = {
    "text": "empty documents",
    "completion": "empty completions",
    "alpaca": "empty outputs",
    "chat": "conversations without an answer",
    "preference": "pairs with an empty answer",
    "label": "empty completions",
}
"""Form → why a record whose answer is empty is skipped."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "human": "user",
    "observation": "tool",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
}


MOST_RECORDS, MOST_REQUESTED = 32, 1 << 18
"""Records that wait for the template together, and characters of their conversations. More objects that live at once
cost Python's garbage collection more than fewer requests save."""
_FAULTS = (ValueError, RecursionError, OverflowError)
Entry = tuple[dict[str, Any] | BrokenRecord | None, str, str]
"""A record, its fault, or None for a blank line; the name of its documents; its place for messages."""
_Finish = Callable[[list[Any]], Sequence[Found]]


@dataclass(frozen=True)
class RecordForm:
    """The form and the fields of a source's records, decided by the first one.

    Attributes:
        name: text, completion, alpaca, chat, preference or label; None: there is no record.
        context: names of the fields before the answers.
        answers: names of the fields that are targets: one, or chosen and rejected.
        tools: name of the field of callable tools, which a record may lack.
        label: name of the field that says whether an answer is desirable; empty in other forms.
        template: the `ChatTemplate` that renders messages; None if the fields hold text.
    """

    name: Form | None = None
    context: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    tools: str = "tools"
    label: str = ""
    template: Any = None

    @classmethod
    def of(cls, record: dict[str, Any], config: DataConfig, open_template: Callable[[], Any]) -> RecordForm:
        """The form of a record by the settings, or else the first of `FORMS` whose fields it has.

        Raises:
            BrokenRecord: it has the fields of no form.
            ValueError: a setting does not suit its form.
        """
        name, fields = _named_fields(record, config)
        tools, label = "tools", ""
        if name == "chat":
            tools, fields = (*fields[1:], "tools")[0], fields[:1]
        if name == "label":
            label, fields = fields[-1], fields[:-1]
        count = 2 if name == "preference" else 1
        has_messages = any(isinstance(record.get(field), list | dict) for field in fields)
        if config.as_chat and name == "text":
            raise ValueError(
                f"data.as_chat=true writes prompts and answers as turns, and this is text ({fields[0]}): leave it out"
            )
        is_chat = name == "chat" or (name != "text" and (has_messages or config.as_chat))
        template = open_template() if is_chat else None
        form = cls(name, fields[:-count], fields[-count:], tools, label, template)
        if config.chat_template and not is_chat:
            raise ValueError(
                f"data.chat_template={config.chat_template} is for messages, but this is {name}"
                f" ({form.describe()}); leave it out, set data.as_chat=true, or name the field of the messages in"
                " data.fields, with data.format=chat"
            )
        if config.drop_system and not is_chat:
            raise ValueError(f"data.drop_system=true is for messages, but this is {name}; leave it out")
        return form

    @property
    def pairs(self) -> bool:
        """Whether a record becomes two documents."""
        return self.name in ("preference", "label")

    @property
    def chat_template(self) -> str:
        """The template as JSON; empty without one."""
        return "" if self.template is None else str(self.template.to_json())

    @property
    def header(self) -> dict[str, Any]:
        """Fields of the header of a store of such records."""
        return {"chat_template": self.chat_template, "pairs": self.pairs, "labels": self.name == "label"}

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the template's special tokens."""
        return () if self.template is None else self.template.special_tokens

    def describe(self) -> str:
        """The fields, and the name of the template with the day that it writes."""
        fields = " → ".join([*self.context, " | ".join(self.answers)]) or "nothing"
        fields += f" ({self.label})" if self.label else ""
        if self.template is None:
            return fields
        return f"{fields}, {self.template.name}" + (f" of {self.template.day}" * self.template.names_the_day)

    def present(self, record: dict[str, Any]) -> Sequence[str]:
        """The fields of the context of a record, without Alpaca's `input` if it has none."""
        if self.name != "alpaca":
            return self.context
        optional = [name for name in self.context[1:] if record.get(name) is not None]
        return [*self.context[:1], *optional]

    def messages(self, record: dict[str, Any]) -> tuple[list[Message], list[list[Message]]]:
        """Context and answers of a record; its field `system` begins the context.

        Preferences may be whole conversations: their common beginning is the context.
        """
        role = "" if self.name == "chat" else "assistant"
        context = [
            entry
            for field in self.present(record)
            for entry in read_messages(_field(record, field), field, "user")
        ]
        if self.name == "alpaca":  # one turn of the user
            said = [entry["content"] for entry in context if entry["content"].strip()]
            context = [{"role": "user", "content": "\n\n".join(said)}]
        answers = [read_messages(_field(record, field), field, role) for field in self.answers]
        first, second = answers[0], answers[-1]
        are_answers = all(answer and answer[0]["role"] == "assistant" for answer in answers)
        if self.pairs and first != second and not are_answers:
            if context and first[: len(context)] != context:
                chosen, rejected = self.answers
                raise ValueError(
                    f"{chosen} is a whole conversation that does not begin with {self.context[0]}; give"
                    f" data.fields=[{chosen},{rejected}] alone"
                )
            same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
            common = sum(1 for _ in same)
            context, answers = first[:common], [answer[common:] for answer in answers]
        if record.get("system") and [entry["role"] for entry in (context or answers[0])[:1]] != ["system"]:
            context = [{"role": "system", "content": _text(record, "system")}, *context]
        return context, answers


def _named_fields(record: dict[str, Any], config: DataConfig) -> tuple[Form, tuple[str, ...]]:
    """The name of a record's form, and its fields, first the fields of the context."""
    form: Any = config.format
    fields = tuple(config.fields)
    if fields and form != "auto":
        return form, fields
    if fields:
        is_list = len(fields) == 1 and isinstance(record.get(fields[0]), list)
        return "chat" if is_list else ("text", "completion", "preference")[len(fields) - 1], fields
    known = [entry for entry in FORMS if form in ("auto", entry[0])]
    found = [entry for entry in known if {*entry[1]} <= record.keys()]
    if form == "auto" and not isinstance(record.get("label"), bool):
        found = [entry for entry in found if entry[0] != "label"]
    if not found and form == "auto":
        raise BrokenRecord(
            "neither `text` nor `prompt` and `completion` nor `messages` nor `chosen` and `rejected` among the"
            f" fields ({', '.join(record) or 'none'}); name the fields to read in data.fields"
        )
    name, fields = (found or known)[0]
    if name == "alpaca":
        fields = ALPACA_FIELDS  # other records may have an input, too
    if name == "preference":
        fields = (*[field for field in CONTEXTS if field in record][:1], *fields)
    return name, fields


class _Begun(NamedTuple):
    """A record: requests to the template, and a function from its answers to the documents."""

    name: str
    where: str
    requests: list[str]
    finish: _Finish


def _gathered(entries: Iterator[_Begun]) -> Iterator[list[_Begun]]:
    """Records whose conversations are written at once; all others one by one, since they wait for nothing."""
    batch, size = list[_Begun](), 0
    try:
        for entry in entries:
            if not batch and not entry.requests:
                yield [entry]
                continue
            batch.append(entry)
            size += sum(map(len, entry.requests))
            if len(batch) == MOST_RECORDS or size >= MOST_REQUESTED:
                yield batch
                batch, size = [], 0
    except Exception:  # such as a broken file: first what was read before
        yield batch
        raise
    yield batch


class RecordReader:
    """Makes documents of the records of one source; the first record decides the form of all.

    Args:
        config: the settings by which records are read.
        open_template: opens the `ChatTemplate` when the first record holds messages.

    Attributes:
        form: of the records; None before the first one.
        noted: what people should know about the records so far.
    """

    def __init__(self, config: DataConfig, open_template: Callable[[], Any]) -> None:
        self._config, self._open_template = config, open_template
        self.form: RecordForm | None = None
        self.restart(Noted())

    def restart(self, noted: Noted) -> None:
        """Forget the records before: the next one is the first, and notes are added to `noted`."""
        self._last_answer: str | list[Message] | None = None
        self.noted = noted

    def columns(self, names: Iterable[str]) -> list[str]:
        """The columns of a table that are read; all of them if a field is missing, so that the error can list them."""
        names, config, form = list(names), self._config, self.form or RecordForm()
        fields = (*form.context, *form.answers) or tuple(config.fields)
        required = [fields] if fields else [known for _, known in FORMS]
        if not any({*some} <= {*names} for some in required):
            return names
        more = ("tools", "system", form.label, config.weight_field, *CONTEXTS)
        wanted = {*more, *(config.fields or chain(*required))}
        return [name for name in names if name in wanted]

    def documents(self, entries: Iterable[Entry], unit: str) -> Iterator[Found]:
        """The documents of records in order: of each one, or two of two answers, or a `Skip` with the reason.

        Conversations are read ahead, because the template writes many of them at once.

        Args:
            entries: the records.
            unit: noun for the entries in messages: `lines` or `rows`.

        Raises:
            ValueError: a setting does not suit the first record.
        """
        for batch in _gathered(self._begun(entry, unit) for entry in entries):
            requests = [request for begun in batch for request in begun.requests]
            written = self.form.template.write(requests) if self.form and requests else iter(())
            for name, where, asked, finish in batch:
                try:
                    found = finish([*islice(written, len(asked))])
                except _FAULTS as error:
                    found = [Skip(f"broken {unit}", name, f"{where}: {error}")]
                yield from found

    def _begun(self, entry: Entry, unit: str) -> _Begun:
        """A record whose documents wait for the template."""
        record, name, where = entry
        found: Found
        try:
            if isinstance(record, dict):
                if self.form is None:
                    self.form = RecordForm.of(record, self._config, self._open_template)
                return _Begun(name, where, *self._documents(self.form, record, name))
            found = (
                Skip(f"blank {unit}", name) if record is None else Skip(f"broken {unit}", name, str(record))
            )
        except _FAULTS as error:
            if self.form is None and not isinstance(error, BrokenRecord):
                raise ValueError(f"{where}: {error}") from error
            found = Skip(f"broken {unit}", name, f"{where}: {error}")
        return _Begun(name, where, [], lambda _: [found])

    def _documents(self, form: RecordForm, record: dict[str, Any], name: str) -> tuple[list[str], _Finish]:
        """Requests to the template for a record, and a function from its answers to the documents."""
        context: Any
        answers: Any
        template, config = form.template, self._config
        if template is None:
            context = [_text(record, field) for field in form.present(record)]
            answers = [_text(record, field) for field in form.answers]
        else:
            context, answers = form.messages(record)
            if config.drop_system:
                answers = answers if context else [_after_system(answer) for answer in answers]
                context = _after_system(context)
        if len(answers) == 2 and answers[0] == answers[1]:
            return [], lambda _: [Skip("pairs of equal answers", name)]
        if not all(map(_has_answer, answers)):
            return [], lambda _: [Skip(WITHOUT_ANSWER[form.name or "text"], name)]
        weight = _weight(record, config.weight_field) if config.weight_field else 1.0
        if form.label:
            weight = weight if _label(record, form.label) else -weight
            last, self._last_answer = self._last_answer, answers[0]
            answers = [answers[0], answers[0] if last is None else last]
        if template is None:
            prompt = [TextPart(text + config.between, False) for text in context]
            if form.name == "alpaca":
                from multipack.data.text.alpaca import alpaca_prompt

                prompt = [TextPart(alpaca_prompt(*context), False)]
            parts = [(*prompt, TextPart(answer, True)) for answer in answers]
            return [], lambda _: _item(name, parts, weight, takes_end=True)
        tools = read_tools(record.get(form.tools), form.tools)
        chats = [template.chat(context + answer, tools) for answer in answers]

        def finish(written: list[Any]) -> Sequence[Found]:
            cut = zip(written, chats, strict=True)
            found = [template.cut(text, chat, len(context)) for text, chat in cut]
            own = zip(answers[:1] if form.label else answers, found, strict=False)  # not another record's
            notes = set().union(*(template.notes(context + answer, tools, parts) for answer, parts in own))
            self.noted.add(Noted(notes=dict.fromkeys(sorted(notes), (1, name))))
            return _item(name, found, weight, takes_end=False)

        return [chat.request() for chat in chats], finish


def _item(
    name: str, found: list[tuple[TextPart, ...]], weight: float, takes_end: bool
) -> list[SourceDocument]:
    """The documents of these parts; the first one has the weight of the item."""
    weights = (weight, *[1.0] * len(found))
    return [SourceDocument(name, parts, takes_end, own) for parts, own in zip(found, weights, strict=False)]


def _field(record: dict[str, Any], field: str) -> Any:
    if field not in record:  # rows of tables lack fields that are null
        raise ValueError(f"no field {field!r}, or null in it (it has {', '.join(record) or 'none'})")
    return record[field]


def _text(record: dict[str, Any], field: str) -> str:
    value = _field(record, field)
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is a {type(value).__name__}, not text")
    try:
        if not value.isascii():  # which is known without a look at the text
            value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r} contains an unpaired surrogate: {error}") from error
    return value


def _after_system(messages: list[Message]) -> list[Message]:
    """Messages without a system message at their beginning."""
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _label(record: dict[str, Any], field: str) -> bool:
    value = _field(record, field)
    if not (isinstance(value, bool | int) and value in (0, 1)):
        raise ValueError(f"field {field!r} is {value!r:.40}, not true or false")
    return bool(value)


def _weight(record: dict[str, Any], field: str) -> float:
    value = _field(record, field)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"field {field!r} is {value!r:.40}, and a weight is a finite number, at least 0")
    return float(value)


def _has_answer(answer: str | list[Message]) -> bool:
    """Whether an answer has text or, in a message of the assistant, a tool call."""
    if isinstance(answer, str):
        return bool(answer.strip())
    answers = [message for message in answer if message["role"] == "assistant"]
    return any(message["content"].strip() or message.get("tool_calls") for message in answers)


# --- messages -----------------------------------------------------------------------------------------


def read_messages(value: Any, field: str = "messages", role: str = "") -> list[Message]:
    """The messages of one conversation, as `role` and `content`: of a list, of one message, or of text.

    Text becomes the content of a message of `role`; without a role it is an error. `field` names the value in errors.
    """
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise ValueError(f"field {field!r} is a {type(value).__name__}, not a list of messages")
    return [_message(message, f"{field}[{number}]") for number, message in enumerate(messages)]


def _message(value: Any, field: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{field} is a {type(value).__name__}, not a message with role and content")
    message = {key: entry for key, entry in value.items() if entry is not None}
    if "role" not in message and "from" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
    if "role" not in message:
        raise ValueError(f"{field} has neither `role` nor `from` ({', '.join(value) or 'it is empty'})")
    role = message["role"]
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"{field} has the role {role!r}; known are {', '.join(ROLES)}")
    return {**message, "role": role, "content": _content(message, field)}


def _content(message: Message, field: str) -> str:
    """The text of a message; the entries of a list are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        raise ValueError(f"the content of {field} is a {type(content).__name__}, not text")
    for entry in content:
        kind = entry.get("type") if isinstance(entry, dict) else type(entry).__name__
        if kind != "text" or not isinstance(entry.get("text"), str):
            raise ValueError(f"the content of {field} holds {kind!r}; only 'text' can be trained on")
    return "".join(entry["text"] for entry in content)


def read_tools(value: Any, field: str) -> list[Any] | None:
    """The tools of a conversation: a list of descriptions, or one in JSON; None if there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"field {field!r} is text, but not a list in JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise ValueError(f"field {field!r} is a {type(value).__name__}, not a list of tools")
    return value


def without_nulls(value: Any) -> Any:
    """`value` without dictionary entries that are None, at any depth.

    Tables have every field in every row, such as `tool_calls: None` in each message without a call; templates ask
    whether a message *has* tool calls.
    """
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
