"""Chat templates run in a sandbox, clients cannot send one, and client input is only data in
them."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from frame.text import chat_template
from frame.text.chat_template import ChatTemplate, ChatTemplateError
from tests.entrypoints.inprocess import serving

MESSAGES = [{"role": "user", "content": "x"}]
ATTACKS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'].codecs.open('/etc/passwd').read() }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ messages|attr('__class__')|attr('__base__') }}",
    "{{ '%s'.__mod__.__self__.__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ self._TemplateReference__context.environment }}{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ lipsum(n=1000) }}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ 9**9**9**9 }}",
    "{{ 'x'.ljust(10**15) }}",
    "{{ '%1000000000000000d' % 1 }}",
)


@pytest.mark.parametrize("source", ATTACKS)
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        text = ChatTemplate(source).render(MESSAGES)
        assert "class" not in text and "root:" not in text and "object at" not in text
        raise ChatTemplateError("nothing came of it")


ENDLESS = (
    LOOPS := "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set x %}" + LOOPS + "{% endset %}",
    "{% block a %}{% for a in range(9) %}{{ self.a() if x }}{% endfor %}" + LOOPS + "{% endblock %}",
    "{% for a in [[[]]] recursive %}{{ loop([1, 2, [3]] * 3) if loop.depth < 40 }}{% endfor %}",
    "{{ range(99999)|select('in', range(99999)|list)|list }}",
    "{{ range(99999)|map('string')|map('center', 500)|map('list')|map('join')|list|length }}" * 40,
    "{% for a in range(99999) if range(99999)|select('none')|list %}{% endfor %}",
)
LARGE = (
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% set n = namespace(x=3) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ [1]|batch(10**10, 'x')|list }}",
    "{{ [1]|slice(10**10)|list }}",
    "{{ 'x'|center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.center(width=10**10) if false else 'x'.zfill(10**10) }}",
    "{{ ('\t' * 99999).expandtabs(99999) }}",
    "{{ ('\n' * 99999)|indent(99999) }}",
    "{{ ('x' * 99999)|replace('x', 'y' * 99999) }}",
    "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
    "{{ ('y' * 99999).join('x' * 99999) }}",
    "{{ range(99999)|join('y' * 99999) }}",
    "{{ (['y' * 99999] * 99999)|join }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**10) }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ ['a' * 10**10] }}",
    "{{ ([[0] * 99999] * 99999)|sum(start=[]) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ [1, 2]|tojson(separators=['x' * 99999, ':']) }}",
)


@pytest.mark.parametrize("source", ENDLESS)
def test_templates_without_output_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TIME", 0.3)
    began = time.thread_time()
    with pytest.raises(ChatTemplateError, match="took more than"):
        ChatTemplate(source).render(MESSAGES)
    assert time.thread_time() - began < 3


@pytest.mark.parametrize("source", LARGE)
def test_values_of_templates_are_bounded(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError, match="refuses these messages"):
            ChatTemplate(source).render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()


def test_ordinary_operations_are_allowed() -> None:
    source = (
        "{% macro tag(name) %}<{{ name }}>{% endmacro %}{% for m in messages %}{{ tag(m.role) ~ loop.index }}{{ m.content|trim }}"
        "{% endfor %}{{ '%s-%03d'|format('a', 7) }}{{ '{:>5}'.format('b') }}{{ '{{{}}}'.format(1) }}{{ [1, 2]|join(', ') }}"
        "{{ 'a-b'.replace('-', '+') }}{{ 'x' * 3 + 'y' }}{{ ([1] + [2])|tojson }}{{ '%d' % 5 }}{{ 7 % 4 }}{{ 2 ** 10 }}"
        "{{ 'x'|center(5) }}{{ 'a\\nb'|indent(2) }}{{ ['u', 'v']|map('upper')|join }}{{ 'a,b'.split(',')|join(attribute=None) }}"
    )
    assert ChatTemplate(source).render(MESSAGES) == "<user>1xa-007    b{1}1, 2a+bxxxy[1, 2]531024  x  a\n  bUVab"


def test_output_and_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ChatTemplate("{% for a in range(1000) %}{% for b in range(1000) %}some text{% endfor %}{% endfor %}")
    monkeypatch.setattr(chat_template, "LARGEST_TEXT", 100_000)
    with pytest.raises(ChatTemplateError, match="characters"):
        endless.render(MESSAGES)
    monkeypatch.setattr(chat_template, "MAX_TIME", 0.0)
    with pytest.raises(ChatTemplateError, match="took more than"):
        endless.render(MESSAGES)


CLIENTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "{{ 7 * 191 }}{% for x in range(9) %}{{ x }}{% endfor %}"}]},
    {"messages": [{"role": "{{ 7 * 191 }}", "content": "x"}]},
    {"messages": MESSAGES, "chat_template": "{{ 7 * 191 }}"},
    {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 7 * 191 }}", "tokenize": True, "x": "{{ 7 * 191 }}"}},
    {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "{{ 7 * 191 }}"}}]},
]


@pytest.mark.parametrize("body", CLIENTS)
async def test_clients_bring_no_template(body: dict[str, Any]) -> None:
    async with serving() as server:
        reply = await server.post("/v1/chat/completions", {**body, "max_tokens": 1})
        assert reply.status in (200, 400)
        assert b"1337" not in reply.body
        if reply.status == 200:
            reply = await server.post("/tokenize", {name: body[name] for name in ("messages", "tools") if name in body})
            text = (await server.post("/detokenize", {"tokens": reply.json()["tokens"]})).json()["text"]
            assert "1337" not in text


async def test_template_arguments_cannot_replace_the_template() -> None:
    async with serving() as server:
        reply = await server.post("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}})
        assert (reply.status, "chat_template_kwargs" in reply.json()["error"]["message"]) == (400, True)
