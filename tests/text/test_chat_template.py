"""Chat templates: continued messages, and tools for templates without tool support."""

from __future__ import annotations

import pytest

from frame.text.chat_template import ChatTemplate, ChatTemplateError

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ASK = [{"role": "user", "content": "2 + 2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_message_is_continued_where_it_ends():
    messages = [*ASK, {"role": "assistant", "content": "The sum is "}]
    template = ChatTemplate(PLAIN)
    assert template.render(messages, arguments={"continue_final_message": True}) == "<user>2 + 2?</s><assistant>The sum is "
    assert template.render(messages).endswith("The sum is</s><assistant>")
    assert template.render(messages, arguments={"add_generation_prompt": False}).endswith("The sum is</s>")


@pytest.mark.parametrize(
    ("messages", "arguments", "reason"),
    [
        (ASK, {}, "last message of the assistant"),
        ([], {}, "last message of the assistant"),
        ([{"role": "assistant", "content": "a"}], {"add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_messages_that_cannot_be_continued(messages, arguments, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        ChatTemplate(PLAIN).render(messages, arguments={"continue_final_message": True, **arguments})


def test_a_template_that_leaves_the_last_message_out():
    with pytest.raises(ChatTemplateError, match="leaves out"):
        ChatTemplate("x").render([{"role": "assistant", "content": "a"}], arguments={"continue_final_message": True})


def test_tools_become_text_without_template_support():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    text = ChatTemplate(PLAIN).render(messages, [TOOL])
    assert text.startswith("<system>Be brief.")
    assert '"name": "add"' in text.partition("<user>")[0]
    assert '<assistant><tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call></s>' in text
    assert "<user><tool_response>\n4\n</tool_response></s>" in text
    assert ChatTemplate(PLAIN).render(ASK, [TOOL]).startswith("<system>You may call")


def test_templates_with_tool_support_get_the_tools():
    template = ChatTemplate("{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}{{ m.role }}{% endfor %}")
    assert template.render([*ASK, {"role": "tool", "content": "4"}], [TOOL]) == "addusertool"
