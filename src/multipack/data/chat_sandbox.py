"""The sandbox of chat templates: Jinja with the names that transformers gives to templates, and with limits.

A template is an untrusted program. Jinja's immutable sandbox hides everything but the messages. Here every pass of a
loop, and every text or list that a template makes, compares or passes to a function, is counted against a budget of
characters and of processor time. Operations whose result or work may be far larger than their operands
(`10 ** 10 ** 9`, `"x" * 10 ** 9`, `"%999999999d"`) are checked before they run.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

OPEN, CLOSE = "\U0010fffc", "\U0010fffd"
"""Characters that mark the begin and end of the output of a `{% generation %}` block."""
MOST_CHARACTERS, MOST_SECONDS = 1 << 27, 10.0
"""Characters (or entries of lists) that one rendering may produce, and seconds of processor time that it may take."""
MOST_SOURCE = 1 << 20
"""Largest template in characters."""
_OPERATION, _CHECK = (
    16,
    1 << 14,
)  # characters charged for every operation; after which the clock is read again
_CONTAINERS = (list, tuple, dict)
_MOST_NUMBER = 1 << 16  # as an argument: widths, counts; in bits: integers; a range has a limit of its own
_LONG_FIELD = re.compile(r"\d{5}|[%{][^a-zA-Z%{}]*\*|\{[^{}]+\{")
_UNBOUNDED = {"wordwrap", "urlize", "expandtabs", "translate", "encode", "striptags"}
_PRODUCTS = {"strip", "lstrip", "rstrip", "trim", "rfind", "rindex", "rsplit", "rpartition"}
"""Methods and filters whose time grows with the product of the lengths of two texts."""
_PASS, _JOIN, _KEEP = "a pass", "joined texts", "kept value"
"""Names of internal filters; they contain spaces, so no template can call them."""


class _Budget(threading.local):
    """What the rendering in this thread may still produce."""

    characters = 0
    next_check = 0
    until = 0.0

    def spend(self, amount: int) -> None:
        self.characters = left = self.characters - amount - _OPERATION
        if left < self.next_check:  # the clock of a thread is slow to read
            if left < 0:
                raise jinja2.TemplateError(f"it produces more than {MOST_CHARACTERS:,} characters")
            if time.thread_time() > self.until:
                raise jinja2.TemplateError(f"it takes more than {MOST_SECONDS:g} s")
            self.next_check = max(left - _CHECK, 0)

    def keep(self, value: Any) -> Any:
        """`value`, after its size is spent: characters, and the entries of lists at every depth."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, _CONTAINERS):
            self.spend(_size(value, self.characters))
        elif isinstance(value, int) and value.bit_length() > _MOST_NUMBER:
            raise jinja2.TemplateError(f"a number of {value.bit_length():,} bits is too large")
        elif isinstance(value, bytes):
            raise jinja2.TemplateError("bytes are not available")
        return value


def _length(value: Any) -> int:
    """Characters of a text or entries of a list; 0 for other values."""
    return len(value) if isinstance(value, (str, *_CONTAINERS)) else 0


def _size(value: list[Any] | tuple[Any, ...] | dict[Any, Any], most: int) -> int:
    """The entries of lists and dictionaries and the characters of texts in a value, until they are more than `most`."""
    size, rest = 0, [value]
    while rest and size <= most:
        container = rest.pop()
        size += len(container)
        for entry in container.values() if isinstance(container, dict) else container:
            if isinstance(entry, str):
                size += len(entry)
            elif isinstance(entry, _CONTAINERS):
                rest.append(entry)
    return size


_budget = _Budget()


@contextmanager
def limited() -> Iterator[None]:
    """Context in which this thread may compile or render one template."""
    _budget.characters, _budget.until = MOST_CHARACTERS, time.thread_time() + MOST_SECONDS
    _budget.next_check = MOST_CHARACTERS - _CHECK
    try:
        yield
    finally:
        _budget.characters = 0


def compile_template(source: str, day: datetime.datetime) -> jinja2.Template:
    """Compile a template, in which `strftime_now` formats `day`; render it within `limited()`.

    Raises:
        ValueError: the source is too large.
        Exception: the source is no template; Jinja and Python raise errors of many kinds.
    """
    if len(source) > MOST_SOURCE:
        raise ValueError(f"it has {len(source):,} characters, and {MOST_SOURCE:,} are the limit")
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
        finalize=_budget.keep,
    )
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _Names
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = partial(_date, day)
    environment.filters = {name: _counted(name, each) for name, each in environment.filters.items()}
    tests: dict[str, Any] = environment.tests
    environment.tests = {name: _counted_test(each) for name, each in tests.items()}
    own: dict[str, Callable[[Any], Any]] = {_PASS: _budget.spend, _JOIN: _join, _KEEP: _budget.keep}
    environment.filters.update({name: jinja2.pass_context(partial(_own, each)) for name, each in own.items()})
    program = _Counting().visit(environment.parse(source))
    return environment.template_class.from_code(
        environment, environment.compile(program), environment.make_globals(None)
    )


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


class _Names(Namespace):
    """A namespace whose repr is short: Jinja's prints its whole content."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Counting(NodeTransformer):
    """Adds to a program what counts its operations; calls, filters, tests and operators count at run time.

    Not counted, because each takes the same short time and makes nothing: names, attributes, entries, constants,
    assignments, conditions, `not`, `and`, `or` and `with`. `include`, `import` and `extends` find no file.
    """

    def get_visitor(self, node: nodes.Node) -> Callable[..., Any] | None:
        """Called by `visit`."""
        return next((visit for kinds, visit in self._kinds if isinstance(node, kinds)), None)

    @property
    def _kinds(self) -> list[tuple[Any, Callable[..., Any]]]:
        return [
            (nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block, self._repeated),
            (nodes.Output, self._written),
            (nodes.List | nodes.Tuple | nodes.Dict, self._made),
            (nodes.Getitem, self._sliced),
            (nodes.Compare, self._compared),
            (nodes.Concat, self._joined),
        ]

    def _repeated(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "test", None) is not None:  # the condition of a loop
            node.test = _filtered(node.test, _KEEP).set_lineno(node.lineno)
        node.body.insert(0, _spending(0, node.lineno))
        return node

    def _written(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        written = sum(len(text.data) for text in node.nodes if isinstance(text, nodes.TemplateData))
        return [_spending(written, node.lineno), node] if written else [node]

    def _sliced(self, node: nodes.Getitem) -> Any:
        self.generic_visit(node)
        return _filtered(node, _KEEP).set_lineno(node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def _compared(self, node: Any) -> Any:
        self.generic_visit(node)
        for each in (node, *node.ops):
            if not isinstance(each.expr, nodes.Const):
                each.expr = _filtered(each.expr, _KEEP).set_lineno(node.lineno)
        return node

    def _joined(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _JOIN).set_lineno(node.lineno)

    def _made(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        is_place = getattr(node, "ctx", "load") != "load"
        entries = node.items
        is_fixed = len(entries) < _OPERATION and all(isinstance(entry, nodes.Const) for entry in entries)
        return node if is_place or is_fixed else _filtered(node, _KEEP).set_lineno(node.lineno)


def _spending(characters: int, line: int) -> nodes.Node:
    return nodes.ExprStmt(_filtered(nodes.Const(characters), _PASS)).set_lineno(line)


def _filtered(node: nodes.Expr, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a budget for operators and calls."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Called by templates in place of an operator."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _budget.spend(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 1) if operator == "**" else 1) + right.bit_length()
            if bits > _MOST_NUMBER:
                raise jinja2.TemplateError(f"a number of {bits:,} bits is too large")
        elif operator == "*":
            for values, count in ((left, right), (right, left)):
                if isinstance(values, str | list | tuple) and isinstance(count, int):
                    _budget.spend(len(values) * max(count, 0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "-":  # of the keys of dictionaries
            _budget.spend(sum(len(each) for each in (left, right) if hasattr(each, "__len__")))
        return _budget.keep(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Called at the attributes `format` and `format_map` of a text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Called by templates in place of a call."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, int, *_CONTAINERS)):
            _check_arguments(__obj.__name__, (owner, *args), kwargs)
        elif isinstance(owner, LoopContext):
            _budget.keep(args)  # `changed` compares them
        return _budget.keep(super().call(__context, __obj, *args, **kwargs))


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are checked and whose result is counted."""

    @wraps(function)  # also copies which of Jinja's objects it takes first
    def counted(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, args[1:] if hasattr(function, "jinja_pass_arg") else args, kwargs)
        return _budget.keep(function(*args, **kwargs))

    return counted


def _counted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test whose arguments are counted: with everything in them if it compares several."""

    @wraps(function)
    def counted(*args: Any) -> Any:
        for value in args:
            if len(args) > 1:
                _budget.keep(value)
            else:
                _budget.spend(_length(value))
        return function(*args)

    return counted


def _check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check and count the arguments of a filter or a method, whose result may be much larger; args[0] is its input."""
    if name in _UNBOUNDED:
        raise jinja2.TemplateError(f"{name} is not available")
    others = [*args[1:], *kwargs.values()]
    _budget.spend(sum(map(_length, (*args[:1], *others))))
    if not others:
        return
    text = str(args[0]) if isinstance(args[0], str) else ""
    for value in others:
        if isinstance(value, int) and abs(value) > _MOST_NUMBER:
            raise jinja2.TemplateError(f"{name} takes numbers of at most {_MOST_NUMBER:,}")
    if name == "format":
        _check_format(text, others)
    elif name in _PRODUCTS:
        _budget.spend(len(text) * max(map(_length, others)))
    elif name == "sum" and any(isinstance(each, list | tuple) for each in others):
        raise jinja2.TemplateError("sum adds numbers only")
    elif name in ("index", "count") and not text:
        _budget.keep([args[0], *others])
    elif name == "replace" and len(others) > 1 and isinstance(others[0], str):
        _budget.spend(text.count(others[0]) * len(str(others[1])))
    elif name == "indent":
        _budget.spend(text.count("\n") * (others[0] if isinstance(others[0], int) else len(others[0])))
    elif name == "join":
        separator, entries = (
            (text, others[:1]) if text or isinstance(args[0], str) else (others[:1], args[:1])
        )
        count = max((len(each) for each in entries if hasattr(each, "__len__")), default=_MOST_NUMBER)
        _budget.spend(count * len(separator if isinstance(separator, str) else "".join(map(str, separator))))


def _check_format(text: str, values: Any) -> None:
    """Refuse wide fields, and count what a format may write: all its widths, and its largest value in every field."""
    if _LONG_FIELD.search(text):
        raise jinja2.TemplateError(
            "a format with a width of five digits, or one that an argument gives, is not available"
        )
    entries = (
        values.values()
        if isinstance(values, dict)
        else values
        if isinstance(values, list | tuple)
        else [values]
    )
    sizes = (_size([each], _budget.characters) for each in entries)
    _budget.spend(sum(map(int, re.findall(r"\d+", text))))
    _budget.spend((text.count("{") + text.count("%")) * max(sizes, default=0))


def _own(function: Callable[[Any], Any], context: Context, value: Any) -> Any:
    return function(value)


def _join(parts: list[Any]) -> str:
    texts = [part if isinstance(part, str) else str(_budget.keep(part)) for part in parts]
    _budget.spend(sum(map(len, texts)))
    return "".join(texts)


def _date(day: datetime.datetime, text: str) -> str:
    _budget.spend(256 * len(text))  # what the C library may need
    return day.strftime(text)


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
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    is_short = indent is None and separators is None
    pieces = [encoder.encode(value)] if is_short else []
    for piece in () if is_short else encoder.iterencode(value):
        _budget.spend(len(piece))
        pieces.append(piece)
    text = "".join(pieces)
    if not ensure_ascii:
        return text
    # Codes of protected text must stay one character, or the text could not be restored.
    return re.sub(r"[^\x00-\x7f]", lambda c: c[0] if is_code(c[0]) else json.dumps(c[0])[1:-1], text)


def is_code(character: str) -> bool:
    """Whether a character belongs to Unicode's last private-use plane, of the codes of protected text."""
    return character >= "\U00100000"
