"""An engine's outputs are the same with and without masks that requests share: with forced tokens,
drafts and preempted requests too."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from frame import Engine, SamplingParams
from frame.plugins.grammar_backends import llguidance

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
    "preempted": {"max_total_tokens": 304},
}


def generate(**settings: Any) -> tuple[list[Any], dict[str, Any]]:
    with Engine(**KEYS, **settings) as engine:
        found: list[Any] = []
        for part in range(2):
            prompts = [[5 + (7 * i + 3 * j + part) % 1900 for j in range(24)] for i in range(12)]
            params = [SamplingParams(max_tokens=40, temperature=1.0, seed=i + 100 * part, **ASKED[i % len(ASKED)]) for i in range(12)]
            found += [(output.token_ids, output.finish_reason) for output in engine.generate(prompts, params)]
        return found, engine.control("server_info")


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_without_shared_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    plain = llguidance.LLGrammar.start_mask

    def note(self: Any, mask: Any) -> Any:
        handle = plain(self, mask)
        used.append(handle is None and not self._is_ended)
        return handle

    monkeypatch.setattr(llguidance.LLGrammar, "start_mask", note)
    found, info = generate(**SETTINGS[name])
    assert sum(used) > len(used) // 3
    assert name != "preempted" or info["preempted"]
    used.clear()
    monkeypatch.setattr(llguidance, "SHARING_KINDS", ())
    expected, _ = generate(**SETTINGS[name])
    assert found == expected and not any(used)
