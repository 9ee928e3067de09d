"""Templates that would run or grow without end are refused in one line; all others write what Jinja writes."""

import datetime
import json
import os
import re
import threading

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multipack.data.text import chat_sandbox as room
from multipack.data.text.chat import ChatTemplate

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi,  you"},
    {"role": "assistant", "content": "<think>no</think>\nHello  there"},
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(100) }}",
    "{% if 2 ** 1000000000 // 3 ** 100000000 %}{% endif %}",
    "{{ ('a' * 9999999).rfind('b' + 'a' * 99999) }}{{ ('a' * 9999999).strip('b' * 99999 + 'a') }}"
    + "{{ ('<!---->' * 2 ** 17) | striptags }}" * 99,
]
LARGE = [
    "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ (5).to_bytes(10 ** 10, 'big') }}",
    "{% for i in range(500) %}{{ 'x' * 9999 }}{% endfor %}",
]
MALFORMED = [
    "{{ " + "(" * 9999 + ")" * 9999 + " }}",
    "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "{{ range(10 ** 9) | list }}",
    "{{ raise_exception('') }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    monkeypatch.setattr(room, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(room, "MOST_BYTES", 1 << 28)
    monkeypatch.setattr(room, "MOST_CHARACTERS", 1 << 22)


def refusal(source):
    with pytest.raises(ValueError, match="the chat template") as refused:
        ChatTemplate(source, ["<a>"]).parts(CHAT)
    assert "\n" not in str(refused.value)
    assert not str(refused.value).endswith(": ")
    return str(refused.value)


@pytest.mark.parametrize(
    ("sources", "reason"),
    [(ENDLESS, "takes more than 0.2 s"), (LARGE, "memory|characters|takes more"), (MALFORMED, "")],
    ids=["endless", "large", "malformed"],
)
def test_templates_that_exceed_a_limit_are_refused(sources, reason):
    for source in sources:
        assert re.search(reason, refusal(source)), source
    assert len(ChatTemplate("a", ["<a>"]).parts(CHAT)) == 1  # and those after them are not


def test_limits_hold_in_threads_and_in_forked_processes():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", ["<a>"])
    expected = template.parts(CHAT[:1])
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(refusal(ENDLESS[0]))),
        threading.Thread(target=lambda: found.extend(template.parts(CHAT[:1]) for _ in range(20))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(expected) == 20
    child = os.fork()
    if not child:
        os._exit(template.parts(CHAT[:1]) != expected)
    assert os.waitpid(child, 0)[1] == 0
    assert template.parts(CHAT[:1]) == expected


def test_conversations_of_one_request_have_limits_of_their_own():
    source = "{% if n == 7 %}" + ENDLESS[0] + "{% endif %}{{ 'x' * n }}"
    sizes = [1, 700_000, 700_000, 10**10, 700_000, 5_000_000, 2, 7, 3]
    written = list(room.ask(source, "2026-01-02", [json.dumps({"n": size}) for size in sizes]))
    reasons = {10**10: "memory", 5_000_000: "characters", 7: "takes more"}
    for size, text in zip(sizes, written, strict=True):
        assert reasons[size] in str(text) if size in reasons else text == "x" * size
    assert isinstance(written[3], ValueError)
    assert "line 1" in str(*room.ask("{% if %}", "2026-01-02", ["null"]))


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
    expected = jinja.from_string(ALL)
    arguments = {"é": [1, {}]}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "a", "arguments": arguments}] * 2}
    for messages in (CHAT, CHAT[1:], [*CHAT, call, *CHAT[1:]]):
        for tools in (None, [{"name": "a", "parameters": {"b": [1, 2]}}]):
            variables = {"messages": messages, "tools": tools}
            assert [*room.ask(ALL, "2026-01-02", [json.dumps(variables)])] == [expected.render(variables)]
