"""Chat templates run in a sandbox, clients cannot send one, and client input is only data in
them."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.text import chat_template
from frame.core.text.chat_template import ChatTemplate, ChatTemplateError
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


def test_output_and_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ChatTemplate("{% for a in range(1000) %}{% for b in range(1000) %}some text{% endfor %}{% endfor %}")
    monkeypatch.setattr(chat_template, "LARGEST_TEXT", 100_000)
    with pytest.raises(ChatTemplateError, match="characters"):
        endless.render(MESSAGES)
    monkeypatch.setattr(chat_template, "LONGEST_TIME", 0.0)
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
        answer = await server.post("/v1/chat/completions", {**body, "max_tokens": 1})
        assert answer.status in (200, 400)
        assert b"1337" not in answer.body
        if answer.status == 200:
            answer = await server.post("/tokenize", {name: body[name] for name in ("messages", "tools") if name in body})
            text = (await server.post("/detokenize", {"tokens": answer.json()["tokens"]})).json()["text"]
            assert "1337" not in text


async def test_template_arguments_cannot_replace_the_template() -> None:
    async with serving() as server:
        answer = await server.post("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}})
        assert (answer.status, "chat_template_kwargs" in answer.json()["error"]["message"]) == (400, True)
