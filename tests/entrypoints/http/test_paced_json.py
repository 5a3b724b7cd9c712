"""Large JSON bodies that are encoded in turns: one turn in a pass of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest

from frame.entrypoints.engine_client.quotas import FairSemaphore
from frame.entrypoints.http.errors import DisconnectedError
from frame.entrypoints.http.paced_json import TURN, Entries, collect_pieces, encode_steps, in_steps, join_events, run_turns


def test_steps_make_the_json_of_the_value() -> None:
    inner = Entries(({"a": Entries(range(n))} for n in range(3)), is_nested=True)
    value = {"x": inner, "empty": Entries(()), "none": {}, "late": lambda: 5, "list": [1, "é"], "rows": Entries(range(100))}
    found = msgspec.json.decode(b"".join(encode_steps(value)))
    rows = [{"a": []}, {"a": [0]}, {"a": [0, 1]}]
    assert found == {"x": rows, "empty": [], "none": {}, "late": 5, "list": [1, "é"], "rows": [*range(100)]}
    assert msgspec.json.decode(b"".join(encode_steps(in_steps({"a": {"b": [1] * 40}})))) == {"a": {"b": [1] * 40}}
    assert join_events([b"a", b"b"]) == b"ab"
    assert b"".join(join_events([b"a", iter([b"b", b"c"]), b"d"])) == b"abcd"  # type: ignore[arg-type]


async def test_one_turn_runs_in_a_pass() -> None:
    """Whatever the number of responses; a tenant with one is served between those of another."""
    turns, passes, order = FairSemaphore(1), 0, list[tuple[int, str]]()

    async def count() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    def steps(name: str) -> Iterator[bytes]:
        for _ in range(3):
            order.append((passes, name))
            time.sleep(TURN)
            yield b"x"

    counting = asyncio.create_task(count())
    found = await asyncio.gather(*(collect_pieces(turns, name, steps(name)) for name in ("a", "a", "a", "b")))
    counting.cancel()
    assert [b"".join(pieces) for pieces in found] == [b"xxx"] * 4
    assert len({number for number, _ in order}) == len(order) == 12
    assert "b" in [name for _, name in order[:3]]
    with pytest.raises(DisconnectedError):
        await run_turns(turns, "a", iter([None]), lambda: True)
