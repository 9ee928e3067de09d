"""Templates that would run or grow without end are refused in one line."""

import json
import os
import re
import threading

import pytest

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


def test_white_space_json_and_dates_are_those_of_transformers():
    source = "{% if n %}\n  {% if n %}\na{% endif %}\n{% endif %}\n{{ {'é': '<'} | tojson }} {{ strftime_now('%d') }}"
    assert [*room.ask(source, "2026-01-02", ['{"n": 1}'])] == ['a{"é": "<"} 02']
