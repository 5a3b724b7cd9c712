"""Two small grammars that make their libraries work for seconds on one token: others go on, and
each ends by its budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from frame.checkpoint.model_config import EMBEDDED, find_model
from tests.entrypoints import base_only
from tests.entrypoints.serving import RunningServer

AMBIGUOUS = "root ::= s\ns ::= s s s | s s | [a-z ]"
LEVELS = "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1} a{i + 1} a{i + 1}" for i in range(12)) + "\na12 ::= [a-z]?"
GRAMMARS = {
    "llguidance": {"ebnf": AMBIGUOUS},
    "structural_tag": {"structural_tag": {"type": "structural_tag", "format": {"type": "grammar", "grammar": LEVELS}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ("--dtype", "float32", "--sampling-grammar-budget", "2", "--max-running-requests", "8")
    with RunningServer(find_model(EMBEDDED), *flags, fake=False, env=base_only.environment()) as running:
        yield running


def generate(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"text": "Say something.", "sampling_params": {"temperature": 1.0, "ignore_eos": True, **fields}}
    return httpx.post(server.url + "/generate", json=body, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_hostile_grammar_ends_by_its_budget(server: RunningServer, name: str) -> None:
    reply = generate(server, max_new_tokens=400, seed=1, **GRAMMARS[name])
    assert reply.status_code == 400, reply.text[:300]
    assert "takes more work for one token than the budget of its backend" in reply.text
    assert generate(server, max_new_tokens=8, regex="[ab]{3}").status_code == 200  # and the next grammar is served


@pytest.mark.soak
@pytest.mark.parametrize("name", GRAMMARS)
def test_others_keep_their_rate_beside_a_hostile_grammar(server: RunningServer, name: str) -> None:
    """Compared with the rate beside as many harmless grammars, whose rows a step has too; in turns,
    so that what else the machine does counts for both."""
    harmless = {"regex": "[a-z ]{400}"}
    rates: dict[bool, float] = {False: 0.0, True: 0.0}
    for turn in range(8):
        is_hostile = bool(turn % 2)
        ends = threading.Event()

        def attack(ends: threading.Event = ends, turn: int = turn, grammar: Any = GRAMMARS[name] if is_hostile else harmless) -> None:
            while not ends.is_set():
                generate(server, max_new_tokens=400, seed=turn, **grammar)

        attackers = [threading.Thread(target=attack) for _ in range(2)]
        for attacker in attackers:
            attacker.start()
        time.sleep(1.0)  # they are at work
        began, before = time.monotonic(), time.monotonic()
        count = 0
        while time.monotonic() - began < 6.0:
            count += generate(server, max_new_tokens=64, seed=3).json()["meta_info"]["completion_tokens"]
            before = time.monotonic()
        rates[is_hostile] += count / (before - began) / 4
        ends.set()
        for attacker in attackers:
            attacker.join()
    print(name, rates)
    assert rates[True] >= 0.8 * rates[False], rates
