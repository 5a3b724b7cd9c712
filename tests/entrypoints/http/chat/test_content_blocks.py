"""Content blocks: deltas in any pieces give the same blocks, and one block is open at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock, ContentBlocks

OUTPUT: list[tuple[str, str]] = [("reasoning", "so it is"), ("text", "Well, "), ("0", '{"a": 1}'), ("1", "{}"), ("text", "done"), ("2", "")]


class RecordingWriter:
    """Records the text of every block and checks the order of the events."""

    def __init__(self) -> None:
        self.open: ContentBlock | None = None
        self.texts: list[str] = []

    def write_start(self, block: ContentBlock) -> bytes:
        assert self.open is None
        assert block.index == len(self.texts)
        self.open = block
        self.texts.append("")
        return b"("

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        assert self.open is block
        self.texts[-1] += piece
        return b"."

    def write_stop(self, block: ContentBlock) -> bytes:
        assert self.open is block
        self.open = None
        return b")"


def random_deltas(rng: random.Random) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for kind, text in OUTPUT:
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(4)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for place, piece in enumerate(pieces):
            if kind.isdigit():
                function = {"arguments": piece} | ({"name": f"f{kind}"} if place == 0 else {})
                found.append({"tool_calls": [{"index": int(kind), "function": function} | ({"id": f"call_{kind}"} if place == 0 else {})]})
            else:
                found.append({"reasoning_content" if kind == "reasoning" else "content": piece})
    return found


@pytest.mark.parametrize("seed", range(20))
def test_streamed_and_whole_deltas_give_the_same_blocks(seed: int) -> None:
    writer, blocks = RecordingWriter(), ContentBlocks()
    events = b"".join(blocks.feed([delta], writer) for delta in random_deltas(random.Random(seed))) + blocks.finish(writer)
    assert (events.count(b"("), events.count(b")"), writer.open) == (len(OUTPUT), len(OUTPUT), None)
    whole = ContentBlocks()
    whole.feed(random_deltas(random.Random(seed + 1)), BlockEventWriter())
    assert [(b.kind, b.name, b.call_id, b.text) for b in blocks.blocks] == [(b.kind, b.name, b.call_id, b.text) for b in whole.blocks]
    assert writer.texts == [block.text for block in whole.blocks] == [text for _, text in OUTPUT]


def test_empty_output_has_no_block() -> None:
    blocks = ContentBlocks()
    assert blocks.feed([{"content": ""}, {}], BlockEventWriter()) + blocks.finish(BlockEventWriter()) == b""
    assert blocks.blocks == []
