"""Chat templates: messages to be continued, tools where the template knows none."""

from __future__ import annotations

import pytest

from frame.core.text.chat_template import ChatTemplate, ChatTemplateError

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
def test_what_cannot_be_continued(messages, arguments, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        ChatTemplate(PLAIN).render(messages, arguments={"continue_final_message": True, **arguments})


def test_a_template_that_leaves_the_last_message_out():
    with pytest.raises(ChatTemplateError, match="leaves out"):
        ChatTemplate("x").render([{"role": "assistant", "content": "a"}], arguments={"continue_final_message": True})


def test_tools_are_told_in_text_where_the_template_knows_none():
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


def test_templates_that_know_tools_print_them_themselves():
    template = ChatTemplate("{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}{{ m.role }}{% endfor %}")
    assert template.render([*ASK, {"role": "tool", "content": "4"}], [TOOL]) == "addusertool"
