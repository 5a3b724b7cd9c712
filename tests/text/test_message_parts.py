import pytest

from frame.core.messages import MediaText
from frame.interfaces.modality import ITEM_NUMBER
from frame.text.chat_template import ChatTemplate, ChatTemplateError
from frame.text.message_parts import MessageParts, check_texts, expand_placeholders

IMAGE = MediaText("image", "<image>", "<row>", "<row><row>")
VIDEO = MediaText("video", "<video>", "<row>", "a<row>b<row>")
# As LLaVA's: it reads parts alone, and writes images first
PARTS_ONLY = """{% for message in messages %}{{ message.role }}: {% for part in message.content | selectattr('type', 'equalto', 'image') -%}
<image>
{% endfor %}{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"""
STRINGS_ONLY = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
WRAPPED = """{% for message in messages %}<{{ message.role }}>{% if message.content is string or message.role == 'tool' -%}
{{ message.content }}{% else -%}
{% for part in message.content %}{{ part.text if part.type == 'text' else '[<image>]' }}{% endfor %}{% endif %}{% endfor %}"""


def render(source: str, *content: object, role: str = "user", media: tuple[MediaText, ...] = (IMAGE,)) -> str:
    template = ChatTemplate(source)
    template.probe_strings()
    message = {"role": role, "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]}
    return template.render(MessageParts(template.render).arrange([message], media))


def test_a_template_that_reads_parts_gets_them() -> None:
    assert render(PARTS_ONLY, "what", {"type": "image"}) == "user: <image>\nwhat"
    assert render(WRAPPED, "what", {"type": "image"}, "?") == "<user>what[<image>]?"


def test_a_template_that_reads_strings_gets_placeholders() -> None:
    assert render(STRINGS_ONLY, "what", {"type": "image"}, "?") == "<user>what<image>\n?"


def test_results_of_tools_are_written_as_the_users_parts_are() -> None:
    assert render(WRAPPED, {"type": "image"}, "seen", role="tool") == "<tool>[<image>]\nseen"


def test_a_template_without_strings_loses_no_text() -> None:
    template = ChatTemplate(PARTS_ONLY)
    assert template.render([{"role": "user", "content": "hello"}]) == "user: "
    template.probe_strings()
    assert template.render([{"role": "user", "content": "hello"}]) == "user: hello"
    strings = ChatTemplate(STRINGS_ONLY)
    strings.probe_strings()
    assert strings.takes_strings


def test_expansions_follow_the_prompts_order() -> None:
    longer = MediaText("image", "<image>", "<row>", "<row>")
    expanded, order = expand_placeholders("x<image>y<video><image>", [VIDEO, IMAGE, longer])
    assert expanded == "x<row><row>ya<row>b<row><row>"
    assert order == [1, 0, 2]


def test_items_are_numbered_by_modality() -> None:
    numbered = [MediaText(each.modality, each.placeholder, each.row_token, f"[{ITEM_NUMBER}]<row>") for each in (IMAGE, VIDEO, IMAGE)]
    assert expand_placeholders("<image>a<video><image>", numbered)[0] == "[0]<row>a[0]<row>[1]<row>"


@pytest.mark.parametrize("text", ["none", "<image><image>", "<image><row>", "<ima<image>ge>" * 2])
def test_numbers_must_agree(text: str) -> None:
    with pytest.raises(ChatTemplateError):
        expand_placeholders(text, [IMAGE])


@pytest.mark.parametrize("value", [["a <image>"], {"a": [{"b": "<row>"}]}, {"<image>": 1}])
def test_texts_of_clients_have_no_placeholders(value: object) -> None:
    with pytest.raises(ChatTemplateError, match="a text of messages has"):
        check_texts(value, [IMAGE], "messages")
    check_texts(["plain", {"a": None, "b": [1, True]}], [IMAGE], "messages")
