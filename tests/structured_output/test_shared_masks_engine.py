"""An engine's outputs are the same with and without masks that requests share: with forced tokens,
drafts and rows that miss steps too."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from frame import Engine, SamplingParams
from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling import GrammarContext
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.plugins.grammar_backends import llguidance
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar
from frame.structured_output.grammar_masks import GrammarCalls
from frame.text.tokenizer import Tokenizer

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
}
ASKED: list[dict[str, Any]] = [
    {"json_schema": json.dumps({"type": "array", "minItems": 100, "items": ITEM})},
    {"regex": "([a-z]{1,9} ){400}"},
    {"choice": ["red", "green", "blue"]},
    {},
]
KEYS: dict[str, Any] = {"dtype": "float32", "threads": 1, "sampling_grammar_workers": 0, "max_model_len": 256, "max_running_requests": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"grammar_jump_forward": 0},
    "forced tokens": {"grammar_jump_forward": 2},
    "drafts": {"grammar_jump_forward": 0, "speculative": {"algorithm": "ngram", "num_steps": 3}},
}


def generate(**settings: Any) -> list[Any]:
    with Engine(**KEYS, **settings) as engine:
        found: list[Any] = []
        for part in range(2):
            prompts = [[5 + (7 * i + 3 * j + part) % 1900 for j in range(24)] for i in range(12)]
            params = [SamplingParams(max_tokens=40, temperature=1.0, seed=i + 100 * part, **ASKED[i % len(ASKED)]) for i in range(12)]
            found += [(output.token_ids, output.finish_reason) for output in engine.generate(prompts, params)]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_without_shared_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    plain = llguidance.LLGrammar.start_mask

    def note(self: Any, mask: Any) -> Any:
        handle = plain(self, mask)
        used.append(handle is None and not self._is_ended)
        return handle

    advance = llguidance.LLGrammar.advance_token

    def note_advance(self: Any, token: int) -> Any:
        known = advance(self, token)
        used.append(known is not None)
        return known

    monkeypatch.setattr(llguidance.LLGrammar, "start_mask", note)
    monkeypatch.setattr(llguidance.LLGrammar, "advance_token", note_advance)
    monkeypatch.setattr(llguidance, "SHARING_REQUESTS", 2)  # depends on the cores otherwise
    found = generate(**SETTINGS[name])
    assert sum(used) > len(used) // 3
    used.clear()
    monkeypatch.setattr(llguidance, "SHARING_KINDS", ())
    assert found == generate(**SETTINGS[name]) and not any(used)


def test_rows_that_miss_steps_keep_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the steps share memory; a preempted request gets its mask in a later step."""
    monkeypatch.setattr(llguidance, "SHARING_REQUESTS", 2)
    backend = llguidance.LLGuidanceBackend(GrammarContext(Tokenizer.load(find_model(EMBEDDED)), 2048))
    compiled, numbers = backend.compile("json_schema", ASKED[0]["json_schema"]), random.Random(2)
    _first = compiled.start()
    table, calls, requests, alone = RequestTable(9, 4), GrammarCalls(2048, 2), [], []
    for i in range(8):
        request = Request(str(i), np.array([1], np.int32), SamplingParams(), 0, i, 0.0, 100.0, 10_000)
        request.tokens, request.grammar = request.all_tokens(), MeteredGrammar(compiled.start(), GrammarMeter(1e9))
        table.add_request(request)
        requests.append(request)
        shared, compiled.shared = compiled.shared, None
        alone.append(compiled.start())
        compiled.shared = shared
    rows = list(range(8))
    for _ in range(120):
        masks = calls.fill_masks(table, np.array([requests[i].slot for i in rows]))
        assert masks is not None and not calls.take_stopped()
        drawn = []
        for place, i in enumerate(rows):
            expected = np.zeros(64, np.int32)
            alone[i].fill_mask(expected)
            assert (masks[place] == expected).all()
            allowed = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little"))
            token = int(allowed[int(len(allowed) * numbers.random() ** 2)])
            assert alone[i].accept_token(token)
            drawn.append((requests[i], [token]))
        assert not any(calls.accept_tokens(drawn, len(rows)))
        rows = sorted(numbers.sample(range(8), 5)) if numbers.random() < 0.4 else list(range(8))
    calls.close()
