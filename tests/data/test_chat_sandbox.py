"""Templates that would run or grow without end are refused in one line; all others write what Jinja writes."""

import datetime
import json
import threading
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multipack.data import chat_sandbox as room
from multipack.data.chat import ChatTemplate
from multipack.data.chat_sandbox import compile_template, limited

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi,  you"},
    {"role": "assistant", "content": "<think>no</think>\nHello  there"},
]
GROWS = "{% set ns = namespace(x=['x'], s='xx') %}{% for i in range(60) %}{% set ns.x = $ %}{% endfor %}{{ ns.x }}"
REPEATS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}a long text{% endfor %}{% endfor %}",
    "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}text{% endfor %}{% endfor %}{% endset %}",
    "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(100) }}",
    "{% macro a() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% set x %}{{ 'x' * 9999999 }}{% endset %}{% set y %}" + "{{ x }}" * 99 + "{% endset %}{{ y }}",
]
LARGE = [
    "{{ 10 ** (10 ** 9) }}",
    "{% if 2 ** 1000000000 %}{% endif %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 10 ** 10 * [1] }}",
    "{{ range(10 ** 9) | list }}",
    "{{ lipsum(n=1000000) }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ ('a' * 9999999).replace('', 'b' * 9999999) }}",
    "{{ ('a' * 9999999) | replace('a', 'b' * 9999999) }}",
    "{{ ('a' * 1000000).join('b' * 1000000) }}",
    "{{ range(99999) | map('string') | join('a' * 1000000) }}",
    "{{ ('\n' * 1000000) | indent(width='x' * 60000) }}",
    "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='x' * 60000) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' | format(999999999, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, '999999999') }}",
    "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "{{ 5 | round(-1000000000) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ (5).to_bytes(10 ** 10, 'big') }}",
]
LONG = "{% set s = 'a' * 2 ** 16 %}{% set l = [1] * 2 ** 14 %}{% set m = ('a' * 2 ** 16) ~ 'b' %}"
REPEATED = [  # reads or copies a long text or list, two thousand times
    *("s[1:]", "s[::-1]", "l[:-1]", "(s ~ '')[1:] == s", "s == s ~ ''", "'b' in s", "2 in l", "2 not in l"),
    *("l == l + [1]", "l < l", "s is in [s ~ '']", "2 is in l", "s is eq(s)", "s is lower", "s.count('b')"),
    *(
        "s.find('b')",
        "s.startswith(s)",
        "s.isalpha()",
        "l.index(2)",
        "l.count(2)",
        "s | length == s.upper() | length",
    ),
    *(
        "l | sum",
        "l | max",
        "[s] | first | length",
        "(s, 1) in {}",
        "dict(a=1).keys() - l",
        "loop.changed(l)",
    ),
]
AT_ONCE = [  # far more work or output than the operands have characters, in one operation
    "{{ l | select('in', l) | list }}",
    "{{ range(99999) | reject('in', l) | list }}",
    "{% for x in l if x is in l %}{% endfor %}",
    "{% for x in range(99999) if 2 in l %}{% endfor %}",
    "{{ ('b' + s).strip(s + 'b') }}",
    "{{ s | trim(m) }}",
    "{{ s.rfind('b' + m) }}",
    "{{ s.rsplit('b' + m) }}",
    "{{ ([[1]] * 2 ** 14) | sum(start=[]) }}",
    "{{ ('<!---->' * 2 ** 14) | striptags }}",
    "{{ (('<!---->' * 2 ** 14) | safe).striptags() }}",
    "{{ ('{0}' * 2 ** 16).format(s) }}",
    "{{ ('{a}' * 2 ** 16).format_map({'a': s}) }}",
    "{{ '%(a)s' * 2 ** 16 % {'a': s} }}",
    "{{ ('%s' * 99) | format(s) }}",
    "{{ ('{:9999}' * 2 ** 14).format(1) }}",
    "{{ '%(a)9999d' * 2 ** 14 % {'a': 1} }}",
    "{{ 'a'.encode().ljust(10 ** 10) }}",
    "{{ (97).to_bytes(1, 'big').ljust(10 ** 10) }}",
    "{{ (97).to_bytes(1, 'big') * 10 ** 10 }}",
    "{{ (s | int(base=16)) // ((m ~ s) | int(base=16)) }}",
    "{{ l | tojson(separators=(s, s)) }}",
    "{{ strftime_now('%c' * 2 ** 16) }}",
    "{% for i in range(99999) %}{% if i >= 0 %}" + "x" * 99999 + "{% endif %}{% endfor %}",
    "{% macro a(n) %}{% if n %}"
    + "x" * 99999
    + "{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(20) }}",
]
LARGE += [f"{LONG}{{% for i in range(2000) %}}{{% set x = {each} %}}{{% endfor %}}" for each in REPEATED]
LARGE += [f"{LONG}{each}" for each in AT_ONCE]
NESTED = ["{{ " + "(" * 9999 + ")" * 9999 + " }}", "{% if 1 %}" * 200 + "{% endif %}" * 200, "x" * (1 << 21)]
NESTED += [
    "{{ 1" + "+1" * 9999 + " }}",
    "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    "{{ 9" + "9" * 5000 + " }}",
]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    monkeypatch.setattr(room, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(room, "MOST_CHARACTERS", 1 << 22)


def refusal(source):
    with pytest.raises(ValueError, match="the chat template") as refused:
        ChatTemplate(source, ["<a>"]).parts(CHAT)
    assert "\n" not in str(refused.value)
    assert not str(refused.value).endswith(": ")
    return str(refused.value)


@pytest.mark.parametrize(
    "source", REPEATS + LARGE + NESTED, ids=lambda source: source.removeprefix(LONG)[:60]
)
def test_templates_that_would_not_end_are_refused(source):
    begun = time.thread_time()
    refusal(source)
    assert time.thread_time() - begun < 5


@pytest.mark.parametrize(
    "step",
    [
        "ns.x + ns.x",
        "ns.x * 2",
        "[ns.x, ns.x]",
        "(ns.x, ns.x)",
        "{'a': ns.x, 'b': ns.x}",
        "dict(a=ns.x, b=ns.x)",
    ],
)
def test_what_doubles_is_refused(step):
    refusal(GROWS.replace("$", step))
    refusal(GROWS.replace("ns.x", "ns.s").replace("$", "ns.s ~ ns.s"))


def test_errors_without_a_message_have_a_reason():
    assert refusal("{{ raise_exception('') }}").endswith("TemplateError")
    assert refusal("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}").endswith("nested too deeply")


def test_limits_hold_in_threads_and_end_with_a_rendering():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", ["<a>"])
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(refusal(REPEATS[0]))),
        threading.Thread(target=lambda: found.extend(template.parts(CHAT[:1]) for _ in range(20))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 21


ALL = r"""
{%- macro show(name, args) -%}<call>{{ {"name": name, "arguments": args} | tojson }}</call>{%- endmacro -%}
{%- set ns = namespace(text='', numbers=[]) -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0]['content'] | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = 'Today is ' ~ strftime_now('%d %b %Y') -%}{%- set rest = messages -%}
{%- endif -%}
<s>{{ system }}{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}
{% for message in rest %}
    {%- if message.role not in ['tool', 'user', 'assistant'] -%}{{ raise_exception('role') }}{%- endif -%}
    {%- if message.tool_calls is defined -%}
        {%- for call in message.tool_calls %}
            {{- show(call.name, call.arguments) }}{{ ', ' if not loop.last }}{% endfor %}
    {%- elif '</think>' in message.content -%}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') -%}
        {{- '<a>' + message.role + '\n' + content.replace('  ', ' ') + '\n' -}}
    {%- else -%}
        {{- '<a>' ~ message['role'] ~ '\n' ~ (message.content | trim) ~ loop.length ~ loop.revindex ~ '\n' -}}
    {%- endif -%}
    {%- set ns.text = ns.text ~ message.role[0] -%}{%- set ns.numbers = ns.numbers + [loop.index] -%}
    {%- if loop.index > 3 %}{% break %}{% endif -%}
{% endfor -%}
{{ ns.text | upper }} {{ ns.numbers | join(', ') }} {{ '%s/%05.1f' % (rest | length, 2) }} {{ '{:>5}'.format(3) }}
{{ rest | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}
{%- for key, value in {'b': 1, 'a': 2}.items() | sort %}{{ key }}={{ value * 2 ** 3 % 5 }}{{ ', ' * 2 }}{% endfor %}
{%- set captured %}{% for a, b in [(1, 2), (3, 4)] %}{{ a ~ b }}{% endfor %}{% endset %}{{ captured | indent(2) }}
{%- for message in rest if message.role in ['user', 'tool'] and 1 < 2 <= 2 %}{{ message.content[::-1][1:] }}{% endfor %}
{{ rest | map(attribute='role') | select('in', ['user']) | list }}
{{ 'user' is in (rest[:1] | map(attribute='role') | list) }}
{{ ' a b '.strip(' ').rsplit(' ', 1) }} {{ ['a', 'b'].index('b') }} {{ 7 // 2 - 1 }} {{ 7 / 2 }} {{ 'ab' is eq('ab') }}
{{ '%(a)s' % {'a': 1} }} {{ '{a}'.format_map({'a': 2}) }} {{ [1, 2] | sum }} {{ '%s-%s' | format('x', 'y') }}
{{ [1, [2, 'x']] }} {{ (1,) }} {{ {'a': none} }} {{ missing }} {{ missing | default('none') }} {{ dict(a=1) }}
"""


def test_all_that_templates_use_is_written_as_jinja_writes_it(monkeypatch):
    monkeypatch.setattr(room, "MOST_SECONDS", 10)
    day = datetime.datetime(2026, 1, 2)
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    jinja.globals["strftime_now"] = day.strftime
    expected, found = jinja.from_string(ALL), compile_template(ALL, day)
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "a", "arguments": {"é": [1, {}]}}] * 2,
    }
    for messages in (CHAT, CHAT[1:], [*CHAT, call, *CHAT[1:]]):
        for tools in (None, [{"name": "a", "parameters": {"b": [1, 2]}}]):
            with limited():
                text = found.render(messages=messages, tools=tools)
            assert text == expected.render(messages=messages, tools=tools)
