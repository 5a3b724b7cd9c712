"""The suite of models: in-tree models pass, a config.json of one's own is used, and what cannot be
checked is skipped. `test_mutants` shows what it finds."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from frame.core.interfaces.model import ModelCapabilities
from frame.core.interfaces.plugin import PluginRecord
from frame.models.llama import LlamaForCausalLM
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.conformance import run_suite
from frame.testing.model import feature_checks, loading_checks, state_checks
from frame.testing.model import session as model_session
from frame.testing.model import suite as model

CONFIG = {
    "architectures": ["OwnForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 900, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "torch_dtype": "float32",
}  # fmt: skip


def subject(target: type) -> conformance.Subject:
    record = PluginRecord("model", "own", "m:Own", "model/4", ModelCapabilities(("OwnForCausalLM",)))
    return conformance.Subject(record, target, None, conformance.Setting())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "deepseek_v3", "transformers"])
def test_in_tree_models_conform(name: str) -> None:
    found = conformance.find(load_registry(installed=False), f"model:{name}", conformance.Setting())
    outcomes = run_suite(found)
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    assert sum(outcome.result == "passed" for outcome in outcomes) >= 5


@pytest.mark.slow
def test_a_config_of_ones_own_is_used_with_random_weights() -> None:
    own = subject(type("Own", (LlamaForCausalLM,), {"conformance_config": CONFIG}))
    (checkpoint,) = model_session.find_checkpoints(own)
    assert checkpoint.folder is None
    assert checkpoint.model_config.vocab_size == 128
    results = {outcome.check: outcome for outcome in run_suite(own)}
    assert results["mixed_batches-OwnForCausalLM"].result == "passed"
    assert results["agrees_with_transformers-OwnForCausalLM"].result == "skipped"
    assert [outcome for outcome in results.values() if outcome.result == "failed"] == []


@pytest.mark.parametrize("module", [feature_checks, loading_checks, state_checks])
def test_the_checks_of_each_module_are_part_of_the_suite(module: ModuleType) -> None:
    own = subject(type("Own", (LlamaForCausalLM,), {"conformance_config": CONFIG}))
    names = {check.name.rpartition("-")[0] for check in model.suite(own)}
    assert {name for name, _ in conformance.find_checks(module.__name__)} <= names


def test_a_lent_tensor_ends_with_the_next_one() -> None:
    first, second = (tensor for _, tensor in loading_checks.lend([("a", torch.ones(2)), ("b", torch.zeros(3))]))
    assert first.isnan().all()
    assert second.isnan().all()


def test_without_a_checkpoint_the_suite_is_skipped() -> None:
    (check,) = model.suite(subject(LlamaForCausalLM))
    with pytest.raises(conformance.SkipCheck, match="`conformance_config`"):
        check.run()


@pytest.mark.parametrize(
    ("name", "check", "result"),
    [
        ("gemma4", "decodes", "passed"),  # heads of two sizes
        ("gemma4", "bfloat16", "passed"),
        ("deepseek_v32", "weights_are_complete", "passed"),  # a module that two others have
        ("kimi_linear", "decodes", "skipped"),  # a recurrent state
    ],
)
def test_models_with_other_caches(name: str, check: str, result: str) -> None:
    found = conformance.find(load_registry(installed=False), f"model:{name}", conformance.Setting())
    label = next(each.name for each in conformance.checks("model", found) if each.name.startswith(f"{check}-"))
    assert [(outcome.result, outcome.message) for outcome in run_suite(found, only=label)] == [
        (result, "the suite has no cache of kind snapshot; compare served tokens with transformers instead" if result == "skipped" else "")
    ]
