"""Chat templates: render messages as text, and mark the assistant's answers as training targets.

    messages ─ template ─▶ <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello<|im_end|>⏎
                           └──────────── context ──────────────────────────────┘└─ target ──┘└ context

The text of an assistant is a target in every turn, and so is the token that ends the turn: a model learns when to
stop. A template marks it by `{% generation %} … {% endgeneration %}`, the convention of transformers. For a template
without marks the conversation is rendered again up to each turn, once with the generation prompt and once with the
answer; both must be prefixes of the whole.

**No message can spell a special token.** Names of special tokens in messages are replaced by private-use characters
before a template sees them, and restored afterwards as plain text; so are characters at the edge of a message with
which text of the template could complete such a name. (A template that cuts pieces out of the middle of messages could
still assemble a name.)

Templates are untrusted programs: they run in Jinja's immutable sandbox, with the same names as in transformers:
`messages`, `tools`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, `tojson`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multipack.data.data_config import BUILT_IN_TEMPLATES, DataConfig
from multipack.data.records import Message, read_messages
from multipack.data.texts import TextPart
from multipack.data.tokenizer import TokenizerConfig, load_tokenizer, tokenizer_facts
from multipack.data.vocabularies import CHAT_TEMPLATE

FIRST_CODE = 0x100000
"""First code point of the replacements for protected text: the last private-use plane of Unicode."""
OPEN, CLOSE = "\U0010fffc", "\U0010fffd"
"""Characters that mark the begin and end of the output of a `{% generation %}` block."""
_CODES = re.compile("[\U00100000-\U0010ffff]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_FORMAT = "multipack chat template 1"
_BUILT_IN = {
    "chatml": (("<|im_start|>", "<|im_end|>"), "", "<|im_end|>"),
    "llama3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
}
"""Special tokens, bos_token and eos_token of built-in templates; `plain` uses only the tokenizer's end token."""
_LOOKS_SPECIAL = re.compile(r"<\|\w+\|>")


class ChatTemplate:
    """A Jinja chat template and the special tokens that it writes.

    Args:
        source: the template.
        special_tokens: names of its special tokens, in addition to `bos_token` and `eos_token`.
        bos_token: value of the variable `bos_token` in the template; empty = none.
        eos_token: value of the variable `eos_token` in the template; empty = none.
        name: name of the template in error messages.

    Attributes:
        special_tokens: names of all special tokens, including `bos_token` and `eos_token`.
        source, bos_token, eos_token, name: as given.

    Raises:
        ValueError: the template is not valid Jinja, or contains reserved characters.
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
        self.special_tokens = tuple(filter(None, dict.fromkeys((*special_tokens, bos_token, eos_token))))
        self._marks = _GENERATION.search(source) is not None
        self._names = re.compile(_any_of(self.special_tokens))
        begins = _any_of(token[:size] for token in self.special_tokens for size in range(1, len(token)))
        ends = _any_of(token[size:] for token in self.special_tokens for size in range(1, len(token)))
        # Templates may trim messages: white space at an edge stays outside the protected text.
        self.protected = re.compile(
            rf"{self._names.pattern}|{_CODES.pattern}|(?:{begins})(?=\s*\Z)|(?P<space>\A\s*)(?:{ends})"
        )
        if _CODES.search(source):
            raise ValueError(
                f"{name} contains characters of Unicode's last private-use plane, which multipack reserves"
            )
        self._day = datetime.datetime.combine(datetime.date.today(), datetime.time())
        try:
            self.program = _environment(self._day).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{name}, line {error.lineno}: {error.message}") from error

    def parts(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        where: str = "",
        first_target: int = 0,
    ) -> tuple[TextPart, ...]:
        """Render a conversation and divide it at special tokens and at the ends of answers.

        Args:
            messages: see `read_messages`.
            tools: descriptions of the tools that may be called.
            where: file and line of the conversation, for error messages; empty = the template's name.
            first_target: index of the first message whose answer is a target; earlier answers are context.

        Returns:
            The parts in order. Their joined text equals the output of `apply_chat_template` of transformers.

        Raises:
            ValueError: messages are malformed, the template rejects them, or answers cannot be located in its output.
        """
        where = where or self.name
        chat = _Chat(self, read_messages(list(messages), where), tools, where)
        return self._cut(chat.write(), chat, first_target)

    def prompt_parts(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[TextPart, ...]:
        """Render a conversation and the generation prompt.

        The text is divided as by `parts`, so that it is tokenized as in training. No part is a target.

        Raises:
            ValueError: see `parts`.
        """
        chat = _Chat(self, read_messages(list(messages), self.name), tools, self.name)
        return self._cut(chat.write(None, True), chat, len(chat.messages))

    @cached_property
    def end_of_turn(self) -> str:
        """The special token that ends an assistant's turn; empty if the template ends it by text alone."""
        parts = self.parts(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        )
        names = [part.text for part in parts if part.is_target and part.is_special]
        return names[-1] if names else ""

    @property
    def identity(self) -> str:
        """The template as JSON, with the date if the template uses `strftime_now`; it determines the output."""
        return self.to_json() + (f" {self._day:%Y-%m-%d}" if "strftime_now" in self.source else "")

    def to_json(self) -> str:
        """The template as JSON; `from_json` reads it."""
        fields = {
            "format": _FORMAT,
            "name": self.name,
            "special_tokens": self.special_tokens,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "template": self.source,
        }
        return json.dumps(fields, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ChatTemplate:
        """The template that `to_json` wrote.

        Raises:
            ValueError: `text` is not the JSON of a chat template.
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

    def _cut(self, written: str, chat: _Chat, first_target: int) -> tuple[TextPart, ...]:
        """Cut the output at special tokens and at the edges of answers."""
        text = _without_marks(written)
        if self._marks:
            answers = self._marked(written, chat, first_target)
        else:
            answers = self._between_prefixes(text, chat, first_target)
        special = dict(match.span() for match in self._names.finditer(text))
        inside = {position for start, end in special.items() for position in range(start + 1, end)}
        edges = {edge for answer in answers for edge in answer[:2]} - inside
        cuts = sorted({0, len(text), *special, *special.values(), *edges})
        parts, number = list[TextPart](), 0
        for start, stop in pairwise(cuts):
            while number < len(answers) and answers[number].end <= start:
                number += 1
            is_answer = number < len(answers) and answers[number].start <= start and answers[number].is_target
            parts.append(TextPart(chat.restore(text[start:stop]), is_answer, start in special))
        return tuple(parts)

    def _marked(self, written: str, chat: _Chat, first_target: int) -> list[_Answer]:
        """The ranges of `{% generation %}` blocks in the text without their marks."""
        ranges, start, position = list[tuple[int, int]](), -1, 0
        for piece in re.split(f"([{OPEN}{CLOSE}])", written):
            if piece == (CLOSE if start < 0 else OPEN):
                raise ValueError(f"{chat.where}: {self.name} nests its generation blocks")
            if piece == OPEN:
                start = position
            elif piece == CLOSE:
                ranges.append((start, position))
                start = -1
            else:
                position += len(piece)
        turns = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if 0 < first_target < len(chat.messages) and len(turns) != len(ranges):
            raise ValueError(
                f"{chat.where}: {self.name} writes {len(ranges)} generation blocks for {len(turns)} answers, so that"
                " the block of the last answer cannot be found"
            )
        context = sum(turn < first_target for turn in turns)
        return [_Answer(*span, number >= context) for number, span in enumerate(ranges)]

    def _between_prefixes(self, text: str, chat: _Chat, first_target: int) -> list[_Answer]:
        """The ranges of answers in the output of a template without marks."""
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
                    f"{chat.where}: {self.name} writes message {number} of a conversation differently when more"
                    " messages follow, so that the assistant's tokens cannot be located: mark them in the template by"
                    " {% generation %} … {% endgeneration %}, or choose another data.chat_template"
                )
        return answers

    def _answer_end(self, upto: str, start: int) -> int:
        """End of an answer: after its last special token if only white space follows (which is no target)."""
        names = list(self._names.finditer(upto, start))
        return names[-1].end() if names and not upto[names[-1].end() :].strip() else len(upto)


class _Answer(NamedTuple):
    """Range of an answer's characters in the output of a template."""

    start: int
    end: int
    is_target: bool


class _Chat:
    """One conversation whose text is protected against being read as special tokens."""

    def __init__(
        self, template: ChatTemplate, messages: list[Message], tools: Sequence[Any] | None, where: str
    ) -> None:
        self.template, self.where = template, where
        self._codes: dict[str, str] = {}  # protected text → private-use character
        self._texts: dict[str, str] = {}  # the inverse
        self.messages = [{**self._protect(message), "role": message["role"]} for message in messages]
        self._tools = self._protect(list(tools)) if tools else None

    def write(self, count: int | None = None, add_generation_prompt: bool = False) -> str:
        """The template's output for the first `count` messages (None: all), with protected text and marks."""
        messages = self.messages[:count]
        try:
            text = self.template.program.render(
                messages=messages,
                tools=self._tools,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.template.bos_token,
                eos_token=self.template.eos_token,
            )
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{self.where}: a message contains an unpaired surrogate: {error}") from error
        except Exception as error:  # a template is a program: it can fail in any way
            rendered = "the conversation" if count is None else f"its first {len(messages)} messages"
            raise ValueError(f"{self.where}: {self.template.name} refuses {rendered}: {error}") from error
        return text

    def restore(self, text: str) -> str:
        """`text` with all protected text restored."""
        return _CODES.sub(lambda code: self._texts[code.group()], text) if self._texts else text

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.template.protected.sub(self._code, value)
        if isinstance(value, dict):
            return {self._protect(key): self._protect(entry) for key, entry in value.items()}
        return [self._protect(entry) for entry in value] if isinstance(value, list | tuple) else value

    def _code(self, match: re.Match[str]) -> str:
        space = match["space"] or ""
        text = match.group().removeprefix(space)
        if text not in self._codes:
            code = chr(FIRST_CODE + len(self._codes))
            if code >= OPEN:
                raise ValueError(
                    f"{self.where}: more than {len(self._codes):,} different private-use characters"
                )
            self._codes[text], self._texts[code] = code, text
        return space + self._codes[text]


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of any of `texts`, the longest first; without texts it matches nothing."""
    longest_first = sorted({*texts}, key=lambda text: (-len(text), text))
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


def _without_marks(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


# --- Jinja as chat templates expect it ----------------------------------------------------------------


class _GenerationBlocks(Extension):
    """`{% generation %} … {% endgeneration %}`: puts marks around the output of the block."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Called by Jinja at the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _environment(day: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """The sandbox; `strftime_now` formats the day on which the template was opened."""
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
    """JSON as transformers writes it in templates: no HTML escapes, characters as they are."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # Codes of protected text must stay one character, or the text could not be restored.
    return re.sub(r"[^\x00-\x7f]", lambda c: c[0] if _CODES.match(c[0]) else json.dumps(c[0])[1:-1], text)


# --- the template of a configuration ------------------------------------------------------------------


def resolve_template(data: DataConfig, tokenizer: TokenizerConfig) -> ChatTemplate:
    """The template of `data.chat_template`: built in, a file, the tokenizer's own, or else chatml.

    If `data.chat_template` is empty and `tokenizer.kind=file`, a `chat_template.json` beside the tokenizer (as in a
    checkpoint) takes precedence over the tokenizer's own template.

    Raises:
        ImportError: a package that the tokenizer needs is not installed.
        ValueError: the template or file does not exist, or a file writes special tokens that
            `data.special_tokens` does not name.
    """
    name = data.chat_template
    if name in _BUILT_IN:
        return built_in_template(name)
    if name and name not in BUILT_IN_TEMPLATES:
        return _of_file(Path(name).expanduser(), data.special_tokens, tokenizer)
    if tokenizer.kind == "file" and not name:
        path = Path(tokenizer.path).expanduser()
        of_run = (path if path.is_dir() else path.parent) / CHAT_TEMPLATE
        if of_run.is_file():
            return ChatTemplate.from_json(of_run.read_text("utf-8"))
    facts = tokenizer_facts(tokenizer)
    if facts.chat_template and not name:
        label = f"the template of {tokenizer.name}"
        return ChatTemplate(
            facts.chat_template, facts.special_tokens, facts.bos_token, facts.eos_token, label
        )
    return built_in_template(name or "chatml", facts.eos_token)


def built_in_template(name: str, end_token: str = "") -> ChatTemplate:
    """A chat template that ships with multipack.

    Args:
        name: `chatml`, `llama3` or `plain`.
        end_token: the special token that ends an answer in `plain`.

    Raises:
        ValueError: no such template, or `plain` without an end token.
    """
    if name not in BUILT_IN_TEMPLATES:
        raise ValueError(
            f"there is no built-in chat template {name!r}: one of {', '.join(BUILT_IN_TEMPLATES)}"
        )
    special, bos, eos = _BUILT_IN.get(name, ((), "", end_token))
    if not eos:
        raise ValueError(
            "data.chat_template=plain ends each answer with the tokenizer's end token, but the tokenizer has none"
        )
    source = (resources.files("multipack") / "presets" / "chat" / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, special, bos, eos, name)


def _of_file(file: Path, special_tokens: list[str], tokenizer: TokenizerConfig) -> ChatTemplate:
    try:
        source = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.chat_template={file}: one of {', '.join(BUILT_IN_TEMPLATES)}, or a readable Jinja file: {error}"
        ) from error
    facts = tokenizer_facts(tokenizer)
    special = tuple(special_tokens) or facts.special_tokens
    template = ChatTemplate(source, special, facts.bos_token, facts.eos_token, file.name)
    unnamed = sorted(set(_LOOKS_SPECIAL.findall(source)) - set(template.special_tokens))
    if unnamed and tokenizer.kind in ("file", "transformers"):
        # A tokenizer may have ordinary tokens of such names: text, on purpose.
        vocabulary = load_tokenizer(tokenizer)
        unnamed = [name for name in unnamed if len(vocabulary.encode(name)) != 1]
    if unnamed:
        raise ValueError(
            f"data.chat_template={file} writes {', '.join(unnamed)} as plain text: name the special tokens of the"
            " template in data.special_tokens=[NAME,NAME,…]"
        )
    return template
