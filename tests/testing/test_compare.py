"""Serving with a plugin and with a reference: equal tokens, and where wrong ones come from."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frame.config.schema import FrameConfig
from frame.core.interfaces.plugin import PluginRecord
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration import prepare as preparing
from frame.entrypoints.offline.collector import Output
from frame.interfaces.kinds import KINDS
from frame.interfaces.parsing import ToolDelta
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry
from frame.testing.compare import plugins as comparing
from frame.testing.compare.plugins import NOT_COMPARED, PARSERS, RANKED, SERVED, compare, main
from frame.testing.compare.texts import Verdict, compare_grammars, compare_parsers

MODULE = "compared_plugins"
NUM_TOKENS = 12
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
SETTINGS = {"model": {"load_format": "dummy", "dtype": "float32"}, "execution": {"device": "cpu", "threads": 1}}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    found = load_registry(installed=False)
    monkeypatch.setattr(preparing, "load_configured", lambda *_: found)
    monkeypatch.setitem(sys.modules, MODULE, types.ModuleType(MODULE))
    yield found


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return {"llama": tmp_path}


def add(registry: Registry, kind: str, base: str, **members: Any) -> PluginRecord:
    """Register the plugin `base` with other members."""
    right = registry.get(kind, base)
    setattr(sys.modules[MODULE], kind, type("Other", (registry.load(right),), {"__module__": MODULE, **members}))
    part = registry.kind(kind, "theirs", "1")
    part.add("other", f"{MODULE}:{kind}", capabilities=right.capabilities)
    registry.commit(part)
    return registry.get(kind, "other")


def test_equal_plugins_are_equal(registry: Registry, models: dict[str, Path]) -> None:
    other = add(registry, "attention_backend", "torch_native")
    (verdict,) = compare(other, registry.get("attention_backend", "torch_native"), models, SETTINGS, NUM_TOKENS)
    assert verdict.problem == verdict.skipped == ""
    assert min(verdict.milliseconds) > 0
    assert str(verdict).startswith("llama: equal; ")


def test_the_first_wrong_step_and_layer_are_named(registry: Registry, models: dict[str, Path]) -> None:
    reference = registry.get("attention_backend", "torch_native")
    base = registry.load(reference)

    def run(self: Any, spec: Any, q: Any, k: Any, v: Any, batch: Any) -> Any:
        out = base.run(self, spec, q, k, v, batch)  # type: ignore[attr-defined]
        return -out if spec.layer == 1 and batch.num_decodes and int(batch.host.seq_lens.max()) > 75 else out

    (verdict,) = compare(add(registry, "attention_backend", "torch_native", run=run), reference, models, SETTINGS, NUM_TOKENS)
    assert verdict.problem.startswith("differs: token ")
    assert "the first different hidden states are those of step " in verdict.problem
    assert ", layers.1, by " in verdict.problem


def test_a_policy_changes_no_token(registry: Registry, models: dict[str, Path]) -> None:
    policies = [registry.get("scheduling_policy", name) for name in ("lof", "fcfs")]
    (verdict,) = compare(policies[0], policies[1], models, SETTINGS, NUM_TOKENS)
    assert verdict.problem == ""


def test_a_model_that_a_plugin_cannot_serve_is_skipped(registry: Registry, models: dict[str, Path]) -> None:
    part = registry.kind("attention_backend", "theirs", "1")
    capabilities = registry.get("attention_backend", "triton").capabilities
    part.add("other", "nowhere:Backend", capabilities=capabilities)
    registry.commit(part)
    records = [registry.get("attention_backend", name) for name in ("other", "torch_native")]
    (verdict,) = compare(records[0], records[1], models, SETTINGS, NUM_TOKENS)
    assert str(verdict).startswith("llama: skipped: attention.backend: other cannot serve this model")


class TwoRanks:
    """Stands for `Engine`: tokens by the name of the collective."""

    def __init__(self, config: FrameConfig) -> None:
        assert config.parallel.tp == 2
        self.token = 7 if config.parallel.collective == "gloo" else 8
        self.step = 0

    def __enter__(self) -> TwoRanks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def control(self, action: str) -> dict[str, Any]:
        return {"vocab_size": 128, "step": self.step, "dtype": "float32"}

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Output]:
        self.step += params.max_tokens or 0
        return [Output(token_ids=[self.token] * (params.max_tokens or 0)) for _ in prompts]


def test_collectives_serve_on_two_ranks(registry: Registry, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "Engine", TwoRanks)
    gloo, nccl = (registry.get("collective", name) for name in ("gloo", "nccl"))
    (equal,) = compare(gloo, gloo, models, SETTINGS, NUM_TOKENS)
    assert (equal.problem, equal.milliseconds[0] > 0) == ("", True)
    (verdict,) = compare(nccl, gloo, models, SETTINGS, NUM_TOKENS)
    assert verdict.problem == "differs: token 0 of request 0 is 8 instead of 7"


@pytest.mark.soak
@pytest.mark.parametrize("kind", RANKED)
def test_two_ranks_are_real(kind: str, models: dict[str, Path]) -> None:
    record = load_registry(installed=False).get(kind, {"collective": "gloo", "launcher": "local"}[kind])
    (verdict,) = compare(record, record, models, SETTINGS, NUM_TOKENS)
    assert (verdict.problem, verdict.skipped) == ("", "")


def test_parsers_read_the_same_texts(registry: Registry) -> None:
    reference = registry.get("tool_call_parser", "pythonic")
    base: Any = registry.load(reference)

    def feed(self: Any, text: str) -> ToolDelta:
        found = base.feed(self, text)
        return ToolDelta(found.content.replace("S", ""), found.calls)

    equal = list(compare_parsers(reference, reference, registry))
    assert [verdict.problem for verdict in equal] == [""] * 4
    wrong = list(compare_parsers(add(registry, "tool_call_parser", "pythonic", feed=feed), reference, registry))
    assert wrong[2].problem.startswith("differs: 'Hm. [f(")


def test_reasoning_parsers_of_two_formats_differ(registry: Registry) -> None:
    own, other = (registry.get("reasoning_parser", name) for name in ("deepseek_r1", "gpt-oss"))
    assert not any(verdict.problem for verdict in compare_parsers(own, own, registry))
    assert all(verdict.problem.startswith("differs: ") for verdict in compare_parsers(own, other, registry))


@pytest.mark.slow
def test_grammar_backends_judge_the_same_texts(registry: Registry) -> None:
    reference = registry.get("grammar_backend", "xgrammar")
    base: Any = registry.load(reference)

    def compile_wrong(self: Any, kind: str, source: str) -> Any:
        return base.compile(self, kind, source.replace("maybe", "perhaps"))

    other = add(registry, "grammar_backend", "xgrammar", compile=compile_wrong)
    verdicts = list(compare_grammars(other, reference, registry))
    assert [verdict.subject for verdict in verdicts if verdict.problem] == ["regex '(yes|no|maybe)[0-2]{1,2}'"]
    problem = next(verdict.problem for verdict in verdicts if verdict.problem)
    assert problem == "differs: it refuses 'maybe0', the reference takes it"
    assert len(verdicts) > 10


def test_kinds_without_a_comparison_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind is compared in one way, or says why it is not."""
    compared = (*SERVED, *RANKED, *PARSERS, "grammar_backend")
    assert set(KINDS) <= {*compared, *NOT_COMPARED}
    assert not set(compared) & set(NOT_COMPARED)
    assert main("logits_processor", "logit-bias", "logit-bias") == 78
    assert capsys.readouterr().err == (
        "two plugins of the kind logits_processor cannot be compared: each changes the tokens of requests by parameters of its own; "
        "check it with --conformance\n"
    )


def test_a_verdict_says_what_takes_how_long() -> None:
    assert str(Verdict("noise", (1.0, 2.0), unit="a text")) == "noise: equal; 1.00 ms a text, the reference 2.00 ms"
    assert str(Verdict("noise", skipped="too loud")) == "noise: skipped: too loud"


def test_the_exit_code_says_whether_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("reasoning_parser", "gpt-oss", "gpt-oss") == 0
    assert main("reasoning_parser", "gpt-oss", "deepseek_r1") == 1
    assert "  text without marks: differs: " in capsys.readouterr().out
