"""Media in chat templates: the form in which a template takes a message's parts, and the expansions
that take the place of its placeholders.

A template that writes a placeholder for a part such as `{"type": "image"}` gets the parts. Others
get the message as one text, with the placeholder of each item at its place. Used by `Tokenizer`.
Must not know a file, a processor or a token id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from frame.core.messages import MediaText
from frame.interfaces.modality import ITEM_NUMBER
from frame.text.chat_template import PROBE, ChatTemplateError

Messages = list[dict[str, Any]]

_CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {}}}


class MessageParts:
    """How one template takes parts with media. `render`: messages to the prompt's text."""

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render
        self._forms: dict[tuple[str, str, str], str | None] = {}  # bounded by modalities and two roles

    def arrange(self, messages: Messages, media: Sequence[MediaText]) -> Messages:
        """The messages in the forms that the template takes."""
        placeholders = {each.modality: each.placeholder for each in media}
        return [self._arrange(message, placeholders) for message in messages]

    def _arrange(self, message: dict[str, Any], placeholders: Mapping[str, str]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        kinds = {part["type"] for part in content} - {"text"}
        role = "tool" if message.get("role") == "tool" else "user"
        if all(self._item_text(role, kind, placeholders[kind]) is not None for kind in kinds):
            return message
        pieces = [part["text"] if part["type"] == "text" else self._as_text(part["type"], placeholders) for part in content]
        return {**message, "content": "".join(pieces)}

    def _as_text(self, modality: str, placeholders: Mapping[str, str]) -> str:
        """What a user's message has for an item, as far as the template shows it, on a line of its
        own."""
        placeholder = placeholders[modality]
        return f"{self._item_text('user', modality, placeholder) or placeholder}\n"

    def _item_text(self, role: str, modality: str, placeholder: str) -> str | None:
        """What the template writes for an item in a message of this role; None: it takes no
        parts there."""
        key = (role, modality, placeholder)
        if key not in self._forms:
            self._forms[key] = self._find_item_text(role, modality, placeholder)
        return self._forms[key]

    def _find_item_text(self, role: str, modality: str, placeholder: str) -> str | None:
        before: Messages = []
        if role == "tool":
            before = [{"role": "user", "content": [_text("a")]}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
        texts = [self._try([*before, {"role": role, "content": [*items, _text(PROBE)]}]) for items in ([{"type": modality}], [])]
        with_item, without = texts
        if with_item is None or without is None or with_item.count(placeholder) != without.count(placeholder) + 1:
            return None
        if PROBE not in with_item or f"'{PROBE}'" in with_item:  # the second is Python's form of a list
            return None
        start = next((i for i, (one, other) in enumerate(zip(with_item, without, strict=False)) if one != other), len(without))
        inserted = with_item[start : start + len(with_item) - len(without)]
        return inserted if inserted.count(placeholder) == 1 else placeholder

    def _try(self, messages: Messages) -> str | None:
        try:
            return self._render(messages)
        except ChatTemplateError:
            return None


def check_texts(value: Any, media: Sequence[MediaText], place: str) -> None:
    """Raise ChatTemplateError where a client's text has what stands for an item. value: of JSON.
    place: the field, for the sentence."""
    reserved = {text for each in media for text in (each.placeholder, each.row_token)}
    for text in _list_texts(value):
        for each in reserved:
            if each in text:
                raise ChatTemplateError(
                    f"a text of {place} has {each!r}, which stands for media here; leave it out, or write it differently"
                )


def expand_placeholders(text: str, media: Sequence[MediaText]) -> tuple[str, list[int]]:
    """(the prompt with each placeholder replaced by the expansion of its item, the indices of the
    items in the order of the prompt). The i-th placeholder of a modality belongs to its i-th item.
    Raises ChatTemplateError where their numbers differ."""
    waiting: dict[str, list[int]] = {}
    for index, each in enumerate(media):
        waiting.setdefault(each.placeholder, []).append(index)
    pattern = "|".join(re.escape(placeholder) for placeholder in sorted(waiting, key=len, reverse=True))
    pieces = re.split(f"({pattern})", text)
    placed = pieces[1::2]
    for placeholder, indices in waiting.items():
        if (count := placed.count(placeholder)) != len(indices):
            name = media[indices[0]].modality
            sentence = f"the prompt has {count} times {placeholder!r} for {len(indices)} parts of the kind {name}"
            raise ChatTemplateError(f"{sentence}; send as many of one as of the other, in messages that the chat template takes them in")
    for row_token in {each.row_token for each in media}:
        if any(row_token in piece for piece in pieces[::2]):
            raise ChatTemplateError(f"the prompt has {row_token!r}, which stands for media here; leave it out")
    queues = {placeholder: iter(indices) for placeholder, indices in waiting.items()}
    order = [next(queues[placeholder]) for placeholder in placed]
    numbers = {index: str(number) for indices in waiting.values() for number, index in enumerate(indices)}
    pieces[1::2] = [media[index].expansion.replace(ITEM_NUMBER, numbers[index]) for index in order]
    return "".join(pieces), order


def _list_texts(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            stack += each.keys()
            stack += each.values()
        elif isinstance(each, list):
            stack += each


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
