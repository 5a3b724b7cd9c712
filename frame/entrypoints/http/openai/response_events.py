"""Content blocks as output items and events of the Responses API, in the order that its clients
rely on.

Used by `response_builder` and, for stored responses, by the routes. Must not depend on the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from frame.entrypoints.http.chat.content_blocks import BlockEventWriter, ContentBlock, Kind
from frame.entrypoints.http.openai.responses_schema import CUSTOM_ARGUMENT, custom_input

_encode = msgspec.json.encode
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
PARTS = {"reasoning": "reasoning_text", "text": "output_text"}


class EventWriter(BlockEventWriter):
    """Writes the numbered events of one response.

    `name`: the response's id; the ids of its items contain its suffix. `custom_tools`: names of the
    tools whose calls carry a text in place of JSON arguments.
    """

    def __init__(self, name: str, custom_tools: frozenset[str] = frozenset()) -> None:
        self._suffix = name.partition("_")[2]
        self._custom_tools = custom_tools
        self._number = 0

    def write_event(self, kind: str, **fields: Any) -> bytes:
        """One event of type `response.{kind}`."""
        body = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), _encode(body))

    def make_item(self, block: ContentBlock, status: str = "completed") -> dict[str, Any]:
        """The block as an output item, with the text that it has so far."""
        head = {"type": "message", "id": self._id(block), "status": status}
        if self._is_custom(block):
            text = custom_input(block.text) if status != "in_progress" else ""
            return head | {"type": "custom_tool_call", "call_id": block.call_id, "name": block.name, "input": text}
        if block.kind == "call":
            return head | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
        content = [_part(block, block.text)] if block.pieces else []
        if block.kind == "text":
            return head | {"role": "assistant", "content": content}
        return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}

    def write_start(self, block: ContentBlock) -> bytes:
        added = self.write_event("output_item.added", output_index=block.index, item=self.make_item(block, "in_progress"))
        if block.kind == "call":
            return added
        return added + self.write_event("content_part.added", **self._place(block), content_index=0, part=_part(block, ""))

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        if self._is_custom(block):
            return b""  # the text is known only when its JSON is complete
        if block.kind == "call":
            return self.write_event("function_call_arguments.delta", **self._place(block), delta=piece)
        extra: dict[str, Any] = {"logprobs": block.last_logprobs} if block.kind == "text" else {}
        return self.write_event(f"{PARTS[block.kind]}.delta", **self._place(block), content_index=0, delta=piece, **extra)

    def write_stop(self, block: ContentBlock) -> bytes:
        place = self._place(block)
        if self._is_custom(block):
            text = custom_input(block.text)
            done = self.write_event("custom_tool_call_input.delta", **place, delta=text)
            done += self.write_event("custom_tool_call_input.done", **place, input=text)
        elif block.kind == "call":
            done = self.write_event("function_call_arguments.done", **place, name=block.name, arguments=block.text)
        else:
            extra: dict[str, Any] = {"logprobs": block.logprobs} if block.kind == "text" else {}
            done = self.write_event(f"{PARTS[block.kind]}.done", **place, content_index=0, text=block.text, **extra)
            done += self.write_event("content_part.done", **place, content_index=0, part=_part(block, block.text))
        return done + self.write_event("output_item.done", output_index=block.index, item=self.make_item(block))

    def _is_custom(self, block: ContentBlock) -> bool:
        return block.kind == "call" and block.name in self._custom_tools

    def _id(self, block: ContentBlock) -> str:
        kind = "custom" if self._is_custom(block) else block.kind
        return f"{PREFIXES[kind]}_{self._suffix}_{block.index}"

    def _place(self, block: ContentBlock) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index}


def replay_events(body: dict[str, Any]) -> bytes:
    """The events of a stored, finished response, with each block in one piece."""
    customs = frozenset(item["name"] for item in body["output"] if item["type"] == "custom_tool_call")
    writer = EventWriter(body["id"], customs)
    begun = body | {"status": "in_progress", "completed_at": None, "incomplete_details": None, "output": [], "usage": None}
    events = [writer.write_event("created", response=begun), writer.write_event("in_progress", response=begun)]
    for place, item in enumerate(body["output"]):
        block = _block(place, item)
        events += [writer.write_start(block), *(writer.write_delta(block, piece) for piece in block.pieces), writer.write_stop(block)]
    events.append(writer.write_event(final_event_name(body["status"]), response=body))
    return b"".join(events)


def final_event_name(status: str) -> str:
    """The last event's name; OpenAI has none for cancelled responses."""
    return "incomplete" if status == "cancelled" else status


def _block(place: int, item: dict[str, Any]) -> ContentBlock:
    if item["type"] == "custom_tool_call":
        return ContentBlock(place, "call", item["name"], item["call_id"], [_encode({CUSTOM_ARGUMENT: item["input"]}).decode()])
    if item["type"] == "function_call":
        return ContentBlock(place, "call", item["name"], item["call_id"], [item["arguments"]])
    parts = item["content"]
    logprobs = [entry for part in parts for entry in part.get("logprobs", ())]
    kind: Kind = "text" if item["type"] == "message" else "reasoning"
    return ContentBlock(place, kind, pieces=[part["text"] for part in parts], logprobs=logprobs, last_logprobs=logprobs)


def _part(block: ContentBlock, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": PARTS[block.kind], "text": text}
    return part | {"annotations": [], "logprobs": block.logprobs if text else []} if block.kind == "text" else part
