"""`adapters`: what is refused before the start, and which formats are chosen."""

from __future__ import annotations

import dataclasses

import pytest

from frame.config.resolution.task import find_adapter_conflicts, find_mode_conflicts
from frame.config.resolve import ResolveError, resolve
from frame.config.selection import UnknownPluginError
from frame.core.interfaces.plugin import Reason
from tests.config.test_resolve import H200, LAPTOP, LLAMA, config, names, record, records


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"adapters": {"modules": ("a=/x",)}}, "adapters.modules is set, but adapters.enabled is false"),
        ({"adapters": {"uploads": True}}, "adapters.uploads is set, but adapters.enabled is false"),
        ({"adapters": {"enabled": True, "modules": ("a=/x", "a=/y")}}, "has the name 'a' twice"),
        ({"adapters": {"enabled": True}, "parallel": {"tp": 2, "nnodes": 2}}, "adapters are read on one host"),
    ],
)
def test_adapters_that_cannot_be_served(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ResolveError, match=words):
        resolve(config(**sections), H200, LLAMA, records())


def test_encoder_decoder_models_take_no_adapters() -> None:
    whisper = dataclasses.replace(LLAMA, config={**LLAMA.config, "is_encoder_decoder": True, "max_source_positions": 10})
    (conflict,) = find_adapter_conflicts(config(adapters={"enabled": True}), whisper)
    assert str(conflict).startswith("adapters.enabled is true, but encoder-decoder models take no adapters.")
    assert not list(find_adapter_conflicts(config(adapters={"enabled": True}), LLAMA))


@pytest.mark.parametrize(
    ("change", "on_cpu", "is_refused"),
    [
        ({}, False, False),
        ({"num_experts": 8}, False, True),
        ({"kind": "mla"}, False, True),
        ({"kind": "mla", "num_experts": 8}, True, False),
    ],
)
def test_experts_and_latents_in_the_batch_invariant_mode(change: dict[str, object], on_cpu: bool, is_refused: bool) -> None:
    """On GPUs, rows without an adapter have other bits among rows with some."""
    model, settings = dataclasses.replace(LLAMA, **change), config(adapters={"enabled": True}, execution={"deterministic": True})
    conflicts = [str(each) for each in find_mode_conflicts(settings, model, "generate", None, on_cpu=on_cpu)]
    assert any("adapters.enabled is true, and on GPUs fused products" in each for each in conflicts) == is_refused


def test_adapter_formats_are_all_chosen_or_the_named_one() -> None:
    broken = record("adapter", "broken", problems=(Reason("needs more"),))
    known = records(adapter=[record("adapter", "low"), record("adapter", "high", rank=5), broken])
    assert "adapter" not in resolve(config(), LAPTOP, LLAMA, known).plugins
    resolved = resolve(config(adapters={"enabled": True}), LAPTOP, LLAMA, known)
    assert names(resolved)["adapter"] == ["high", "low"]
    assert resolved.reasons["adapters.format"] == "by each adapter's configuration: high, low"
    assert resolved.rejected["adapters.format"] == {"broken": ["needs more"]}
    assert names(resolve(config(adapters={"enabled": True, "format": "low"}), LAPTOP, LLAMA, known))["adapter"] == ["low"]
    with pytest.raises(UnknownPluginError, match="did you mean 'low'"):
        resolve(config(adapters={"enabled": True, "format": "lov"}), LAPTOP, LLAMA, known)
