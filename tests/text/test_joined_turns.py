from __future__ import annotations

from typing import Any

import pytest

from frame.text.chat_template import ChatTemplate, ChatTemplateError

# As Gemma, Mistral and others: one system message, at the start, and turns that alternate
STRICT = """{% for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('the system message must be first') }}{% endif %}
{%- if not loop.first and message.role == messages[loop.index0 - 1].role %}{{ raise_exception('roles must alternate') }}{% endif %}
<{{ message.role }}>{{ message.content }}{% endfor %}"""
LENIENT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def turns(*texts: str) -> list[dict[str, Any]]:
    roles = {"d": "developer", "s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text} for text in texts]


def test_turns_are_joined_where_the_template_refuses_them() -> None:
    messages = turns("d1", "s2", "u3", "u4", "s5", "a6", "u7")
    assert ChatTemplate(STRICT).render(messages) == "<system>d1\n\ns2<user>u3\n\nu4\n\ns5<assistant>a6<user>u7"
    assert ChatTemplate(LENIENT).render(messages) == "<system>d1<system>s2<user>u3<user>u4<system>s5<assistant>a6<user>u7"


def test_what_cannot_be_joined_is_refused_as_before() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate(STRICT).render(turns("u1", "a2", "a3"))
    parts = [{"role": "user", "content": [{"type": "image"}]}, {"role": "user", "content": "u"}]
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate(STRICT).render(parts)
