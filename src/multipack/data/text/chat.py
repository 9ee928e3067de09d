"""Chat templates: render messages as text, and mark the assistant's answers as training targets.

    messages ─ template ─▶ <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello<|im_end|>⏎
                           └──────────── context ──────────────────────────────┘└─ target ──┘└ context

The text of an assistant is a target in every turn, and so is the token that ends the turn: a model learns when to
stop. A template marks it by `{% generation %} … {% endgeneration %}`, the convention of transformers. For a template
without marks the conversation is rendered again up to each turn, once with the generation prompt and once with the
answer; both must be prefixes of the whole.

**No message can spell a special token.** Names of special tokens in messages, and parts of names at the edges of their
texts, are replaced by private-use characters before a template sees them, and restored afterwards as plain text. (A
template that cuts pieces out of messages could still assemble a name.)

Templates are untrusted programs: they run in the sandbox of `chat_sandbox.py`, with the same names as in transformers:
`messages`, `tools`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, `tojson`.
"""

from __future__ import annotations

import datetime
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import resources
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from multipack.data.text.chat_sandbox import CLOSE, OPEN, ask
from multipack.data.text.data_config import BUILT_IN_TEMPLATES, DataConfig
from multipack.data.text.texts import CHAT_TEMPLATE, Message, TextPart
from multipack.data.text.tokenizer import TokenizerConfig, byte_tokenizer, load_tokenizer
from multipack.data.text.vocabularies import read_text

FIRST_CODE = 0x100000
"""First code point of the replacements for protected text: the last private-use plane of Unicode."""
MOST_NAME = 256
"""Longest name of a special token: any part of it at the edge of a message is protected."""
MOST_DEPTH = 100
"""Levels of lists and objects in a message or a tool: JSON schemas of tools have about 10."""
MOST_RENDERED, MESSAGE_COST = 1 << 30, 250
"""Characters that are rendered to find the answers of a conversation, about 12 s on one core, and the time of a message
in characters: 300 answers in a million tokens, or 1,400 short ones, are within the limit."""
_CODES = re.compile("[\U00100000-\U0010ffff]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_FORMAT = "multipack chat template 2"
_BUILT_IN = {"chatml": ("", "<|im_end|>"), "llama3": ("<|begin_of_text|>", "<|eot_id|>")}
"""bos_token and eos_token of built-in templates; `plain` uses only the tokenizer's end token."""
TOOL_CALLS = "tool_calls that the chat template does not write"
EMPTY_ANSWER = "an empty answer, whose only target is the end of the turn"
NO_END = "an answer whose end is no target, so that the model does not learn to stop"
_LOOKS_SPECIAL = re.compile(r"<\|\w+\|>")
Written = str | ValueError
"""The output of a template for a conversation, or why it writes none."""
_ENCODER = json.JSONEncoder(default=str, check_circular=False)  # the depth is limited
_Answers = list[tuple[int, int, bool]]  # begin and end of answers in the output, and whether they are targets


@dataclass
class ChatTemplate:
    """A Jinja chat template and the special tokens that it writes.

    Raises:
        ValueError: the template is not valid Jinja, or contains reserved characters.
    """

    source: str
    special_tokens: Sequence[str]  # names of its special tokens; `bos_token` and `eos_token` are added
    bos_token: str = ""  # value of the variable `bos_token` in the template; empty = none
    eos_token: str = ""  # value of the variable `eos_token` in the template; empty = none
    name: str = "the chat template"  # in error messages
    day: str = ""  # that `strftime_now` writes, in ISO format; empty = today

    def __post_init__(self) -> None:
        names = (*self.special_tokens, self.bos_token, self.eos_token)
        self.special_tokens = tuple(filter(None, dict.fromkeys(names)))
        if long := [name for name in self.special_tokens if len(name) > MOST_NAME]:
            raise ValueError(
                f"{self.name} has a special token of {len(long[0]):,} characters; {MOST_NAME} are the limit"
            )
        self._has_marks = _GENERATION.search(self.source) is not None
        self._names = re.compile(_any_of(self.special_tokens))
        cuts = [(name[:size], name[size:]) for name in self.special_tokens for size in range(1, len(name))]
        begins, ends = (_any_of(parts) for parts in zip(*cuts, strict=True)) if cuts else ("(?!)", "(?!)")
        # The template's text beside a message could complete the end of a name there, or its beginning.
        self.protected = re.compile(rf"{self._names.pattern}|{_CODES.pattern}|\A{ends}|{begins}(?=\s*\Z)")
        if _CODES.search(self.source):
            raise ValueError(
                f"{self.name} contains characters of Unicode's last private-use plane, which multipack reserves"
            )
        self.day = self.day or datetime.date.today().isoformat()
        if isinstance(answer := next(self.write(["null"])), ValueError):
            raise ValueError(f"{self.name}: {answer}") from answer

    def chat(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Chat:
        """A conversation that this template can write."""
        return Chat(self, messages, tools)

    def write(self, conversations: Iterable[str]) -> Iterator[Written]:
        """The template's output for each conversation (see `Chat.request`), several at a time; see `ask`."""
        return ask(self.source, self.day, conversations)

    def parts(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        first_target: int = 0,
        add_generation_prompt: bool = False,
    ) -> tuple[TextPart, ...]:
        """Render a conversation and divide it at special tokens and at the ends of answers.

        Args:
            messages: dicts with `role`, `content` (text), and other entries that the template reads.
            tools: descriptions of the tools that may be called.
            first_target: index of the first message whose answer is a target; earlier answers are context.
            add_generation_prompt: append the beginning of an answer. No part is a target then, but the text is divided
                as in training, so that it is tokenized equally.

        Returns:
            The parts in order. Their joined text equals the output of `apply_chat_template` of transformers.

        Raises:
            ValueError: the template rejects the messages, or answers cannot be located in its output.
        """
        chat = Chat(self, messages, tools)
        (written,) = self.write([chat.request(None, add_generation_prompt)])
        return self.cut(written, chat, len(messages) if add_generation_prompt else first_target)

    def notes(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, parts: Sequence[TextPart]
    ) -> set[str]:
        """Notes on a conversation, written as `parts`, that is not trained as it looks."""
        turns = [list(turn) for is_target, turn in groupby(parts, lambda part: part.is_target) if is_target]
        found = {TOOL_CALLS} if self._leaves_out_calls(messages, tools) else set[str]()
        if any(all(part.is_special or not part.text.strip() for part in turn) for turn in turns):
            found.add(EMPTY_ANSWER)
        ends = [[part.is_special for part in turn if part.text.strip()][-1:] for turn in turns]
        if [False] in ends:
            found.add(NO_END)
        return found

    def _leaves_out_calls(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Whether messages call tools, and the template writes none of the calls."""
        if not any(entry.get("tool_calls") for entry in messages):
            return False
        without = [{key: value for key, value in entry.items() if key != "tool_calls"} for entry in messages]
        try:
            chats = [Chat(self, each, tools) for each in (messages, without)]
            written = self.write(chat.request() for chat in chats)
            texts = [chat.restore(chat.read(text)) for chat, text in zip(chats, written, strict=True)]
        except ValueError:  # it refuses messages without calls, and so it reads them
            return False
        return texts[0] == texts[1]

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
        return self.to_json() + (f" {self.day}" if self.names_the_day else "")

    @property
    def names_the_day(self) -> bool:
        """Whether the template may write its date."""
        return "strftime_now" in self.source

    def to_json(self) -> str:
        """The template as JSON, without its date; `from_json` reads it."""
        fields = {name: value for name, value in asdict(self).items() if name != "day"}
        return json.dumps({"format": _FORMAT, **fields}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str, day: str = "") -> ChatTemplate:
        """The template that `to_json` wrote, with a date; `ValueError` if `text` is something else."""
        try:
            fields = json.loads(text)
            if (found := fields.pop("format")) != _FORMAT:
                raise ValueError(f"format {found!r} instead of {_FORMAT!r}")
            return cls(**fields, day=day)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a chat template of multipack: {error}") from error

    def cut(self, answer: Written, chat: Chat, first_target: int) -> tuple[TextPart, ...]:
        """Cut the output at special tokens and at the edges of answers; see `parts`."""
        written = chat.read(answer)
        text = written.replace(OPEN, "").replace(CLOSE, "")
        find = self._marked if self._has_marks else self._between_prefixes
        answers = find(written, chat, first_target)
        special = dict(match.span() for match in self._names.finditer(text))
        starts = [0, *special]
        cuts = {0, len(text), *special, *special.values()}
        for begin, end, _ in answers:
            for edge in (begin, end):
                start = starts[bisect_right(starts, edge) - 1]
                if not start < edge < special.get(start, 0):  # not inside a special token
                    cuts.add(edge)
        targets = sorted((begin, end) for begin, end, is_target in answers if is_target)
        begins, ends = [begin for begin, _ in targets], list(accumulate((end for _, end in targets), max))
        parts = list[TextPart]()
        for start, stop in pairwise(sorted(cuts)):
            begun = bisect_right(begins, start)  # targets that have begun
            is_target = begun > 0 and start < ends[begun - 1]
            parts.append(TextPart(chat.restore(text[start:stop]), is_target, start in special))
        return tuple(parts)

    def _marked(self, written: str, chat: Chat, first_target: int) -> _Answers:
        """The ranges of `{% generation %}` blocks in the text without their marks."""
        marks = list(re.finditer(f"[{OPEN}{CLOSE}]", written))
        if "".join(mark.group() for mark in marks) != (OPEN + CLOSE) * (len(marks) // 2):
            raise ValueError(f"{self.name} nests its generation blocks")
        places = [mark.start() - number for number, mark in enumerate(marks)]  # in the text without marks
        ranges = list(zip(places[::2], places[1::2], strict=True))
        turns = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        context = sum(turn < first_target for turn in turns)
        if 0 < context < len(turns) != len(ranges):
            raise ValueError(
                f"{self.name} writes {len(ranges)} generation blocks for {len(turns)} answers, so that"
                " the block of the last answer cannot be found"
            )
        return [(*span, number >= context) for number, span in enumerate(ranges)]

    def _between_prefixes(self, text: str, chat: Chat, first_target: int) -> _Answers:
        """The ranges of answers in the output of a template without marks.

        White space after the special token that ends an answer is not a target. The time grows with the number of
        answers times the length of the text.
        """
        count = sum(message["role"] == "assistant" for message in chat.messages)
        if count * (len(text) + MESSAGE_COST * len(chat.messages)) > MOST_RENDERED:
            raise ValueError(
                f"{self.name} marks no answers, so that each is found by rendering what is before it, and {count:,}"
                f" answers in {len(text):,} characters are too many: mark them in the template by {{% generation %}} …"
                " {% endgeneration %}, or divide the conversation"
            )
        answers = []
        turns = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        prefixes = [prefix for number in turns for prefix in ((number, True), (number + 1, False))]
        written = self.write(chat.request(*prefix) for prefix in prefixes)
        for number, first, second in zip(turns, written, written, strict=True):
            is_target = number >= first_target
            try:
                before, upto = chat.read(first, number), chat.read(second, number + 1)
            except ValueError:
                if is_target:
                    raise
                continue
            if text.startswith(upto) and upto.startswith(before):
                end = max(
                    (match.end() for match in self._names.finditer(upto, len(before))), default=len(upto)
                )
                end = len(upto) if upto[end:].strip() else end
                answers.append((len(before), end, is_target))
            elif is_target:
                raise ValueError(
                    f"{self.name} writes message {number} of a conversation differently when more"
                    " messages follow, so that the assistant's tokens cannot be located: mark them in the template by"
                    " {% generation %} … {% endgeneration %}, or choose another data.chat_template"
                )
        return answers


class Chat:
    """One conversation whose text is protected against being read as special tokens."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> None:
        self.template = template
        self._codes: dict[str, str] = {}  # protected text → private-use character
        self.messages = [{**self._protect(message), "role": message["role"]} for message in messages]
        self._tools = self._protect(list(tools)) if tools else None
        self._texts = {code: text for text, code in self._codes.items()}
        if OPEN in self._texts:
            raise ValueError("messages contain too many different private-use characters")

    def request(self, count: int | None = None, add_generation_prompt: bool = False) -> str:
        """The request to the template, as JSON: write the first `count` messages (None: all)."""
        return _ENCODER.encode(
            {
                "messages": self.messages[:count],
                "tools": self._tools,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": self.template.bos_token,
                "eos_token": self.template.eos_token,
            }
        )

    def read(self, answer: Written, count: int | None = None) -> str:
        """The template's output for the first `count` messages, with protected text and marks."""
        if isinstance(answer, ValueError):
            rendered = "the conversation" if count is None else f"its first {count} messages"
            raise ValueError(f"{self.template.name} refuses {rendered}: {answer}") from answer
        text = answer
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a message contains an unpaired surrogate: {error}") from error
        return text

    def restore(self, text: str) -> str:
        """`text` with all protected text restored."""
        if not self._texts:
            return text
        return _CODES.sub(lambda code: self._texts.get(code.group(), code.group()), text)

    def _protect(self, value: Any, depth: int = 0) -> Any:
        if depth > MOST_DEPTH:  # Python's own limit depends on the caller
            raise ValueError(f"a message or tool is nested more than {MOST_DEPTH} levels deep")
        if isinstance(value, str):
            text = value.lstrip()  # templates may strip messages
            return value.removesuffix(text) + self.template.protected.sub(self._code, text)
        if isinstance(value, dict):
            return {self._protect(key): self._protect(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._protect(entry, depth + 1) for entry in value]
        return value

    def _code(self, match: re.Match[str]) -> str:
        return self._codes.setdefault(match.group(), chr(FIRST_CODE + len(self._codes)))


def _any_of(words: Iterable[str]) -> str:
    """A pattern that matches any of these words, the longest possible one; without words it matches nothing."""
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})"


# --- the template of a configuration ------------------------------------------------------------------


def resolve_template(data: DataConfig, tokenizer: TokenizerConfig) -> ChatTemplate:
    """The template of `data.chat_template`: built in, a file, the tokenizer's own, or else chatml.

    If `data.chat_template` is empty and `tokenizer.kind=file`, a `chat_template.json` beside the tokenizer (as in a
    checkpoint) takes precedence over the tokenizer's own template.

    Raises:
        ValueError: the template or file does not exist, or a file writes special tokens that
            `data.special_tokens` does not name.
    """
    name = data.chat_template
    if name in _BUILT_IN:
        return built_in_template(name)
    if tokenizer.kind == "file" and not name:
        path = Path(tokenizer.path).expanduser()
        saved = (path if path.is_dir() else path.parent) / CHAT_TEMPLATE
        if saved.is_file():
            return ChatTemplate.from_json(read_text(saved), data.template_date)
    # Tokenizers that multipack trains have the byte tokenizer's end token, and no template.
    own = byte_tokenizer() if tokenizer.is_trained else load_tokenizer(tokenizer)
    if name == "plain" or not (name or own.chat_template):
        return built_in_template(name or "chatml", own.eos_token)
    special, end_tokens = tuple(data.special_tokens) or own.special_tokens, (own.bos_token, own.eos_token)
    if not name:
        return ChatTemplate(
            own.chat_template, special, *end_tokens, "the tokenizer's template", data.template_date
        )
    try:
        source = read_text(Path(name).expanduser())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.chat_template={name}: one of {', '.join(BUILT_IN_TEMPLATES)}, or a readable Jinja file: {error}"
        ) from error
    template = ChatTemplate(source, special, *end_tokens, Path(name).name, data.template_date)
    unnamed = set(_LOOKS_SPECIAL.findall(source)) - set(template.special_tokens)
    # A tokenizer may have ordinary tokens of such names: text, on purpose.
    unnamed = {token for token in unnamed if len(own.encode(token)) != 1}
    if unnamed:
        raise ValueError(
            f"data.chat_template={name} writes {', '.join(sorted(unnamed))} as plain text: name the special tokens of"
            " the template in data.special_tokens=[NAME,NAME,…]"
        )
    return template


def built_in_template(name: str, end_token: str = "") -> ChatTemplate:
    """The template `chatml`, `llama3` or `plain`, which ship with multipack; answers in `plain` end in `end_token`."""
    bos, eos = _BUILT_IN.get(name, ("", end_token))
    if not eos:
        raise ValueError(
            "data.chat_template=plain ends each answer with the tokenizer's end token, but the tokenizer has none"
        )
    source = (resources.files("multipack") / "presets" / "chat" / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, _LOOKS_SPECIAL.findall(source), bos, eos, name)
