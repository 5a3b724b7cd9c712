"""Blocks of an answer as items of the Responses API, and their events in the order that its clients rely on. Knows no engine."""

from __future__ import annotations

from typing import Any

import msgspec

from frame.entrypoints.http.blocks import Block

_encode = msgspec.json.encode
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
PARTS = {"reasoning": "reasoning_text", "text": "output_text"}


class EventWriter:
    """The events of one response, numbered. `name`: the response's id, of which those of its items are made."""

    def __init__(self, name: str) -> None:
        self._suffix = name.partition("_")[2]
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event of type `response.{kind}`."""
        body = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), _encode(body))

    def item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        """A block as it is now."""
        head = {"type": "message", "id": self._id(block), "status": status}
        if block.kind == "call":
            return head | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
        content = [_part(block, block.text)] if block.pieces else []
        if block.kind == "text":
            return head | {"role": "assistant", "content": content}
        return head | {"type": "reasoning", "summary": [], "content": content}

    def opened(self, block: Block) -> bytes:
        added = self.event("output_item.added", output_index=block.place, item=self.item(block, "in_progress"))
        if block.kind == "call":
            return added
        return added + self.event("content_part.added", **self._place(block), content_index=0, part=_part(block, ""))

    def grown(self, block: Block, piece: str) -> bytes:
        if block.kind == "call":
            return self.event("function_call_arguments.delta", **self._place(block), delta=piece)
        extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self.event(f"{PARTS[block.kind]}.delta", **self._place(block), content_index=0, delta=piece, **extra)

    def closed(self, block: Block) -> bytes:
        place = self._place(block)
        if block.kind == "call":
            done = self.event("function_call_arguments.done", **place, name=block.name, arguments=block.text)
        else:
            extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            done = self.event(f"{PARTS[block.kind]}.done", **place, content_index=0, text=block.text, **extra)
            done += self.event("content_part.done", **place, content_index=0, part=_part(block, block.text))
        return done + self.event("output_item.done", output_index=block.place, item=self.item(block))

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._suffix}_{block.place}"

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.place}


def _part(block: Block, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": PARTS[block.kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if block.kind == "text" else part
