"""Chats as text: Jinja templates, and which of what they write is a target.

    messages ─ template ─▶ <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello<|im_end|>⏎
                           └────────────── read ───────────────────────────────┘└─ target ──┘└ read

What an assistant says is a target, in every turn, and so is the token that ends its turn: a model learns when to
stop. A template says where that is by `{% generation %} … {% endgeneration %}`, the convention of transformers.
Where it does not, the conversation is written again up to each turn, once with the prompt that asks for an answer and
once with the answer; both must be beginnings of the whole.

**Nobody can write a special token but the template.** Names of special tokens in messages are replaced by private-use
characters before a template sees them, and put back afterwards as plain text. So are characters at a message's
edge with which the template's own text could complete such a name. (A template that cuts pieces out of the middle of
messages may still put a name together; none that is known does.)

Templates are programs of other people: they run in Jinja's immutable sandbox, and see what transformers shows them:
`messages`, `tools`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, `tojson`.
"""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multipack.data.messages import Message, read_messages
from multipack.data.source import Part

FIRST_CODE = 0x100000
"""What is protected becomes characters from here on: the last private-use plane of Unicode."""
OPEN, CLOSE = "\U0010fffc", "\U0010fffd"
"""Around what a `{% generation %}` block writes."""
_CODES = re.compile("[\U00100000-\U0010ffff]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_FORMAT = "multipack chat template 1"


class ChatTemplate:
    """A Jinja template of chats, and the special tokens that it writes.

    Args:
        source: the template.
        special_tokens: names of the special tokens that it writes, beside the two that follow.
        bos_token: what it knows by that name; empty = none.
        eos_token: likewise.
        name: for people.

    Attributes:
        source: the template.
        special_tokens: every name that becomes one token.
        bos_token: see above.
        eos_token: see above.
        name: for people.

    Raises:
        ValueError: the template is not one of Jinja's.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Sequence[str],
        bos_token: str = "",
        eos_token: str = "",
        name: str = "the chat template",
    ) -> None:
        self.source, self.name = source, name
        self.bos_token, self.eos_token = bos_token, eos_token
        names = dict.fromkeys((*special_tokens, bos_token, eos_token))
        self.special_tokens = tuple(token for token in names if token)
        self._marks = _GENERATION.search(source) is not None
        longest_first = sorted(self.special_tokens, key=lambda token: (-len(token), token))
        names_pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._names = re.compile(names_pattern)
        self._protected = re.compile(f"{names_pattern}|{_CODES.pattern}")
        self._beginnings = {token[:size] for token in self.special_tokens for size in range(1, len(token))}
        self._endings = {token[size:] for token in self.special_tokens for size in range(1, len(token))}
        if _CODES.search(source):
            raise ValueError(
                f"{name} holds private-use characters of Unicode's last plane, which stand for others here"
            )
        self._day = datetime.datetime.combine(datetime.date.today(), datetime.time())
        try:
            self._template = _environment(self._day).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{name}, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """What the template writes of a conversation.

        Args:
            messages: see `data/messages.py`.
            tools: descriptions of the tools that may be called.
            add_generation_prompt: whether it ends where an assistant's answer begins.

        Raises:
            ValueError: messages that are none, or that the template refuses.
        """
        chat = _Chat(self, read_messages(list(messages), self.name), tools, self.name)
        return chat.plain(_without_marks(chat.write(None, add_generation_prompt)))

    def parts(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        where: str = "",
        train_on_prompt: bool = False,
        first_target: int = 0,
    ) -> tuple[Part, ...]:
        """The conversation in pieces: special tokens, and the text between them; what an assistant says is a target.

        Args:
            messages: see `data/messages.py`.
            tools: descriptions of the tools that may be called.
            where: file and line of the conversation, for errors.
            train_on_prompt: whether all is a target.
            first_target: number of the first message whose answer is a target; those before it are context.

        Raises:
            ValueError: messages that are none, that the template refuses, or whose answers cannot be told from the
                rest.
        """
        where = where or self.name
        chat = _Chat(self, read_messages(list(messages), where), tools, where)
        return self._cut(chat.write(), chat, 0 if train_on_prompt else first_target, train_on_prompt)

    def prompt_parts(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[Part, ...]:
        """What a model reads before it answers: the conversation, and the beginning of the assistant's turn.

        It is cut where `parts` cuts it, so that it is tokenized as in training.

        Raises:
            ValueError: see `render`.
        """
        chat = _Chat(self, read_messages(list(messages), self.name), tools, self.name)
        return self._cut(chat.write(None, True), chat, len(chat.messages))

    @cached_property
    def end_of_turn(self) -> str:
        """The special token that closes an assistant's turn, and its targets; empty if text alone closes it."""
        parts = self.parts(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
        names = [part.text for part in parts if part.is_target and part.is_special]
        return names[-1] if names else ""

    @property
    def identity(self) -> str:
        """All that decides what is written, the day included if the template asks for it."""
        return self.to_json() + (f" {self._day:%Y-%m-%d}" if "strftime_now" in self.source else "")

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(
            {
                "format": _FORMAT,
                "name": self.name,
                "special_tokens": self.special_tokens,
                "bos_token": self.bos_token,
                "eos_token": self.eos_token,
                "template": self.source,
            },
            ensure_ascii=False,
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> ChatTemplate:
        """The template that `to_json` wrote.

        Raises:
            ValueError: it did not write this.
        """
        try:
            fields = json.loads(text)
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r} instead of {_FORMAT!r}")
            strings = [fields[name] for name in ("template", "bos_token", "eos_token", "name")]
            tokens = fields["special_tokens"]
            if not all(isinstance(entry, str) for entry in (*strings, *tokens)):
                raise ValueError("a field is not text")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not a chat template of multipack: {error}") from error
        return cls(strings[0], tokens, *strings[1:])

    def _cut(
        self, written: str, chat: _Chat, first_target: int, all_targets: bool = False
    ) -> tuple[Part, ...]:
        """A conversation at special tokens, which only the template can have written, and at the borders of answers."""
        text = _without_marks(written)
        if self._marks:
            answers = self._marked(written, chat, first_target)
        else:
            answers = self._between_prefixes(text, chat, len(chat.messages) if all_targets else first_target)
        answers = [answer for answer in answers if answer.start < answer.end]
        borders = [border for answer in answers for border in (answer.start, answer.end)]

        def is_target(position: int) -> bool:
            number, is_inside = divmod(bisect_right(borders, position), 2)
            return all_targets or (is_inside == 1 and answers[number].is_target)

        parts, position = list[Part](), 0
        for name in [*self._names.finditer(text), None]:
            end = name.start() if name else len(text)
            cuts = [position, *(border for border in borders if position < border < end), end]
            for start, stop in pairwise(cuts):
                if start < stop:
                    parts.append(Part(chat.plain(text[start:stop]), is_target(start)))
            if name:
                parts.append(Part(name.group(), is_target(end), True))
                position = name.end()
        return tuple(parts)

    def _marked(self, written: str, chat: _Chat, first_target: int) -> list[_Answer]:
        """Where the blocks of `{% generation %}` stand in the text without their marks."""
        spans, start, position = list[tuple[int, int]](), -1, 0
        for piece in re.split(f"([{OPEN}{CLOSE}])", written):
            if piece == (CLOSE if start < 0 else OPEN):
                raise ValueError(f"{chat.where}: the generation blocks of {self.name} stand in each other")
            if piece == OPEN:
                start = position
            elif piece == CLOSE:
                spans.append((start, position))
                start = -1
            else:
                position += len(piece)
        turns = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if 0 < first_target < len(chat.messages) and len(turns) != len(spans):
            raise ValueError(
                f"{chat.where}: {self.name} writes {len(spans)} generation blocks for {len(turns)} answers, so "
                "that it cannot be said which of them is the last one's"
            )
        context = sum(turn < first_target for turn in turns)
        return [_Answer(*span, number >= context) for number, span in enumerate(spans)]

    def _between_prefixes(self, text: str, chat: _Chat, first_target: int) -> list[_Answer]:
        """Where answers stand in what a template without marks writes."""
        answers = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            is_target = number >= first_target
            try:
                before, upto = chat.write(number, True), chat.write(number + 1)
            except ValueError:
                if is_target:
                    raise
                continue
            if text.startswith(upto) and upto.startswith(before):
                answers.append(_Answer(len(before), self._answer_end(upto, len(before)), is_target))
            elif is_target:
                raise ValueError(
                    f"{chat.where}: {self.name} writes message {number} of a conversation in another way when more "
                    "follows, so that the assistant's tokens cannot be told from the rest: mark them in the template "
                    "by {% generation %} … {% endgeneration %}, or take another data.chat_template"
                )
        return answers

    def _answer_end(self, upto: str, start: int) -> int:
        """The end of an answer: after its last special token, if only the end of a line follows, which is nobody's."""
        names = list(self._names.finditer(upto, start))
        return names[-1].end() if names and not upto[names[-1].end() :].strip() else len(upto)

    def __repr__(self) -> str:
        return f"ChatTemplate({self.name!r}, special_tokens={self.special_tokens})"


class _Answer(NamedTuple):
    """An answer in what a template wrote, from character to character."""

    start: int
    end: int
    is_target: bool


class _Chat:
    """One conversation, protected from being read as special tokens, while a template writes it."""

    def __init__(
        self, template: ChatTemplate, messages: list[Message], tools: Sequence[Any] | None, where: str
    ) -> None:
        self.template, self.where = template, where
        self._codes: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self.messages = [{**self._protect(message), "role": message["role"]} for message in messages]
        self._tools = self._protect(list(tools)) if tools else None

    def write(self, count: int | None = None, add_generation_prompt: bool = False) -> str:
        """What the template makes of the first `count` messages (None: of all), in codes and with marks."""
        messages = self.messages[:count]
        try:
            text = self.template._template.render(
                messages=messages,
                tools=self._tools,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.template.bos_token,
                eos_token=self.template.eos_token,
            )
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{self.where}: a message holds half a surrogate pair: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            of = "the conversation" if count is None else f"its first {len(messages)} messages"
            raise ValueError(f"{self.where}: {self.template.name} refuses {of}: {error}") from error
        return text

    def plain(self, text: str) -> str:
        """`text` with everything put back that was protected."""
        return _CODES.sub(lambda code: self._texts[code.group()], text) if self._texts else text

    def _code(self, text: str) -> str:
        if text not in self._codes:
            code = chr(FIRST_CODE + len(self._codes))
            if code >= OPEN:
                raise ValueError(
                    f"{self.where}: {len(self._codes):,} different private-use characters are too many"
                )
            self._codes[text] = code
            self._texts[code] = text
        return self._codes[text]

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, dict):
            return {
                self._protect_names(key) if isinstance(key, str) else key: self._protect(entry)
                for key, entry in value.items()
            }
        return [self._protect(entry) for entry in value] if isinstance(value, list | tuple) else value

    def _protect_names(self, text: str) -> str:
        return self.template._protected.sub(lambda match: self._code(match.group()), text)

    def _protect_text(self, text: str) -> str:
        """Names in `text`, and edges that would be part of a name if the template wrote its rest beside them."""
        text = self._protect_names(text)
        body = text.strip()  # templates may trim
        if any(body[-size:] in self.template._beginnings for size in self._sizes(body)):
            cut = len(text.rstrip()) - 1
            text = text[:cut] + self._code(text[cut]) + text[cut + 1 :]
        if any(body[:size] in self.template._endings for size in self._sizes(body)):
            cut = len(text) - len(text.lstrip())
            if not _CODES.match(text[cut]):
                text = text[:cut] + self._code(text[cut]) + text[cut + 1 :]
        return text

    def _sizes(self, text: str) -> range:
        longest = max(map(len, self.template.special_tokens), default=0)
        return range(1, min(longest, len(text) + 1))


class _GenerationBlocks(Extension):
    """`{% generation %} … {% endgeneration %}`: what stands between is the assistant's, and is marked as such."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way of saying it

    def parse(self, parser: Parser) -> nodes.Node:
        """Called by Jinja at the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _without_marks(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def _environment(day: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it; `strftime_now` tells the day on which the template was opened."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = day.strftime
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in templates: no escapes for HTML, and characters as they are."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # What stands for protected text must stay one character, or it could not be put back.
    return re.sub(r"[^\x00-\x7f]", lambda c: c[0] if _CODES.match(c[0]) else json.dumps(c[0])[1:-1], text)
