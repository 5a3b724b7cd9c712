"""Plugins that were written for an earlier interface are refused with the new names."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from frame.core.interfaces.sampling import LogitsProcessor
from frame.interfaces.kinds import KINDS
from frame.plugins.prefix_caches.none import NoCache
from frame.plugins.registry import PluginError, Registry, cause_chain
from frame.plugins.renames import (
    FORMER_KINDS,
    INTERFACES,
    MOVED_MODULES,
    MOVED_NAMES,
    RENAMES,
    describe_hook,
    describe_import,
    describe_renames,
)

MODULE = "frame_test_old_plugin"


class OldProcessor(LogitsProcessor):
    """As `logits_processor/1` had it."""

    def wants(self, params: Any) -> bool:
        return True

    def admit(self, setup: Any) -> None: ...

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None: ...

    def observe(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None: ...

    def release(self, slot: int) -> None: ...


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType(MODULE)
    made.OldProcessor = OldProcessor  # type: ignore[attr-defined]
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def registry_with(kind: str, target: str, **arguments: str) -> Registry:
    registry = Registry()
    part = registry.kind(kind, "frame-old", "1.0")
    part.add("old", target, **arguments)  # type: ignore[arg-type]
    registry.commit(part)
    return registry


def test_an_earlier_version_is_refused_with_the_version_offered_and_the_new_names() -> None:
    registry = registry_with("attention_backend", f"{MODULE}:OldBackend", api="attention/1")
    with pytest.raises(PluginError) as caught:
        registry.get("attention_backend", "old")
    text = str(caught.value)
    assert "written for interface attention/1, this frame supports attention_backend/4" in text
    assert "rename AttentionNeeds to AttentionRequirements, AttentionOut to AttentionOutput" in text


def test_a_class_without_a_stated_version_is_refused_with_the_names_of_its_methods(module: types.ModuleType) -> None:
    registry = registry_with("logits_processor", f"{MODULE}:OldProcessor")
    with pytest.raises(PluginError) as caught:
        registry.load(registry.get("logits_processor", "old"))
    assert "does not implement add_slot, applies_to, observe_tokens, remove_slot of logits_processor/3" in str(caught.value)
    assert "rename LogitsProcessor.wants to LogitsProcessor.applies_to" in str(caught.value)


class OldCache(NoCache):
    """As `prefix_cache/1` had it: all methods in one class."""

    def outline(self, limit: int) -> list[Any]:
        return []


def test_a_class_with_the_methods_of_an_optional_one_is_refused_unless_it_derives_from_it(module: types.ModuleType) -> None:
    module.OldCache = OldCache  # type: ignore[attr-defined]
    registry = registry_with("prefix_cache", f"{MODULE}:OldCache")
    with pytest.raises(PluginError, match=r"has outline and does not derive from frame\.core\.interfaces\.cache\.SupportsOutline"):
        registry.load(registry.get("prefix_cache", "old"))


def test_methods_of_the_interface_itself_are_no_sign_of_an_optional_class() -> None:
    registry = registry_with("logits_processor", "frame.plugins.logits_processors.min_tokens:MinTokens")  # has those of SupportsSlots
    registry.load(registry.get("logits_processor", "old"))


def test_an_import_of_an_old_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(ImportError) as caught:
        exec("from frame.core.interfaces.model import ModelFacts")
    sentence = describe_import(caught.value)
    assert sentence == "The plugin was written for an earlier interface; this frame supports model/4: rename ModelFacts to ModelConfig."
    assert describe_import(ImportError("No module named 'x'", name="x")) == ""
    wrapped = RuntimeError("no plugin")
    wrapped.__cause__ = caught.value
    assert describe_import(wrapped) == sentence
    assert cause_chain(wrapped).endswith(sentence)


@pytest.mark.parametrize(("old", "new"), MOVED_MODULES.items())
def test_an_import_of_a_moved_module_is_refused_with_the_new_one(old: str, new: str) -> None:
    importlib.import_module(new)
    parent, _, name = old.rpartition(".")
    for statement in (f"import {old}", f"from {parent} import {name}"):
        with pytest.raises(ImportError) as caught:
            exec(statement)
        assert describe_import(caught.value) == f"The plugin was written for an earlier frame: {old} is {new} now."


@pytest.mark.parametrize(("old", "new"), MOVED_NAMES.items())
def test_an_import_of_a_moved_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    (old_module, _, old_name), (new_module, _, new_name) = old.partition(":"), new.partition(":")
    assert hasattr(importlib.import_module(new_module), new_name)
    with pytest.raises(ImportError) as caught:
        exec(f"from {old_module} import {old_name}")
    sentence = f"The plugin was written for an earlier frame: {old_module}.{old_name} is {new_module}.{new_name} now."
    assert describe_import(caught.value) == sentence


def test_every_version_between_asked_and_offered_is_described() -> None:
    assert describe_renames("model/2", "model/2") == describe_renames("model/4", "model/2") == describe_renames("x", "model/2") == ""
    assert "ModelFacts to ModelConfig" in describe_renames("model/1", "model/4")
    assert "finish() to process_weights_after_loading()" in describe_renames("model/3", "model/4")
    for kind in ("weight_format", "gemm_kernel"):  # which share the weight
        assert "PackedWeight.codes to CanonicalWeight.quantized" in describe_renames(f"{kind}/1", f"{kind}/2")


BOTH = "by weight_format/2 (hook register_weight_formats) and gemm_kernel/2 (hook register_gemm_kernels)"


@pytest.mark.parametrize("api", ["quantization/2", "quantization_method/3"])
@pytest.mark.parametrize("kind", ["weight_format", "gemm_kernel"])
def test_a_plugin_of_a_split_kind_is_refused_with_both_new_kinds(api: str, kind: str) -> None:
    registry = registry_with(kind, f"{MODULE}:OldMethod", api=api)
    with pytest.raises(PluginError) as caught:
        registry.get(kind, "old")
    assert f"written for interface {api}, this frame supports {KINDS[kind].api}" in str(caught.value)
    assert f"replace {api.partition('/')[0]} {BOTH}" in str(caught.value)


def test_an_import_of_the_page_of_a_split_kind_is_refused_with_both_new_kinds() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec("from frame.core.interfaces.quantization import QuantizationMethod")
    assert describe_import(caught.value) == f"The plugin was written for an earlier interface: replace quantization {BOTH}."


@pytest.mark.parametrize(("former", "kinds"), FORMER_KINDS.items())
def test_former_kinds_are_gone_and_those_that_replace_them_exist(former: str, kinds: tuple[str, ...]) -> None:
    assert former not in KINDS
    assert set(kinds) <= set(KINDS)
    assert all(KINDS[kind].hook in describe_hook(f"register_{former}s") for kind in kinds)


@pytest.mark.parametrize("rename", RENAMES, ids=lambda rename: f"{rename.api}-{rename.old}")
def test_new_names_exist_and_old_ones_do_not(rename: Any) -> None:
    kind, _, version = rename.api.partition("/")
    assert 1 < int(version) <= KINDS[kind].version
    if "(" in rename.new or rename.new.startswith("register_"):
        return  # a constructor's arguments, a method of any module, or a hook
    (package,) = (each for each in INTERFACES if importlib.util.find_spec(f"{each}.{rename.module}"))
    page: Any = importlib.import_module(f"{package}.{rename.module}")
    for path, exists in ((rename.new, True), (rename.old, False)):
        owner, _, name = path.rpartition(".")
        found = getattr(page, owner, None) if owner else page
        if found is not None:
            names = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
            assert (hasattr(found, name) or name in names) == exists, path
