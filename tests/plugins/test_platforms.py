"""Platforms by name: the choice, devices that are found, and serving on platforms of other
packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from frame import Engine
from frame.config.resolve import ResolveError
from frame.config.schema import FrameConfig
from frame.config.selection import UnknownPluginError
from frame.core.execution.piecewise_graphs import PiecewiseGraphs
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.platform import PlatformCapabilities, UsableDevices
from frame.core.interfaces.rank_context import Limits, RankContext
from frame.entrypoints.configuration import prepare as preparing
from frame.entrypoints.configuration.hardware_probe import probe
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry
from frame.testing import conformance
from frame.testing.checkpoints import make_checkpoint
from frame.testing.conformance import run_suite
from frame.testing.ranks.platform import suite
from tests.plugins import fake_platform, platform_example
from tests.plugins.fake_platform import FakeGraph

PROMPTS = [[5, 6, 7, 8], list(range(40, 90)), [9]]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
SMALL = {"max_total_tokens": 2048, "max_model_len": 256, "threads": 1, "dtype": "float32"}
Install = Callable[[ModuleType], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a module's platforms plugins of an installed package."""

    def add(module: ModuleType) -> None:
        def read(config: FrameConfig, classes: Sequence[type] = (), assumed: frozenset[str] = frozenset()) -> Registry:
            registry = load_registry(installed=False)
            part = registry.kind("platform", "theirs", "1.0")
            module.register_platforms(part)
            registry.commit(part)
            return registry

        monkeypatch.setattr(preparing, "load_configured", read)

    return add


def generate(**keywords: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with Engine(**{**SMALL, **keywords}) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)], engine.info


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(device="cpu")[0]


@pytest.mark.slow
def test_a_fake_platform_serves_the_tokens_of_the_cpu(install: Install, expected: list[list[int]]) -> None:
    install(fake_platform)
    tokens, info = generate(device="fake")
    assert tokens == expected
    assert (info["device"], info["overlap"]) == ("fake", True)
    assert info["memory"]["total"] == fake_platform.MEMORY


def test_a_platform_of_another_package_is_chosen_by_rank(install: Install, expected: list[list[int]]) -> None:
    install(platform_example)
    tokens, info = generate()
    assert tokens == expected
    assert (info["device"], info["memory"]["is_shared"]) == ("abacus", False)


def test_the_example_passes_the_suite() -> None:
    registry = load_registry(installed=False)
    part = registry.kind("platform", "theirs", "1.0")
    platform_example.register_platforms(part)
    registry.commit(part)
    subject = conformance.find(registry, "platform:abacus", conformance.Setting())
    outcomes = run_suite(subject)
    assert [each.check for each in outcomes] == [each.name for each in suite(subject)]
    assert [each for each in outcomes if each.result == "failed"] == []
    assert {each.check for each in outcomes if each.result == "skipped"} >= {"streams_differ", "graphs_replay"}


def test_steps_with_prompts_run_as_the_platforms_graphs(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, replayed = str(make_checkpoint("LlamaForCausalLM", tmp_path)), []
    plain, _ = generate(model=folder, device="cpu")
    install(fake_platform)
    replay = FakeGraph.replay
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: (replayed.append(graph), replay(graph)))
    captured, info = generate(model=folder, device="fake", prompt_graph_max_tokens=64)
    assert captured == plain
    assert info["prompt_graph_max_tokens"] == 64 and replayed


def test_the_runner_has_the_platforms_objects(install: Install) -> None:
    install(fake_platform)
    sections = {"execution": {"device": "fake", "threads": 1}, "cache": {"max_total_tokens": 512}, "model": {"dtype": "float32"}}
    options = {"plugins": {"options": {"platform/fake": {"memory": 2 << 30}}}}
    prepared = prepare(FrameConfig.model_validate({**sections, **options}))
    runner = build_rank(prepared.resolved, prepared.registry)
    platform = runner.context.platform
    assert isinstance(platform, fake_platform.FakePlatform) and platform.measure_memory().total == 2 << 30
    assert isinstance(runner._stream, fake_platform.FakeStream)
    assert not isinstance(runner.piecewise_graphs, PiecewiseGraphs)  # experts of torch_native are not captured
    runner.close()


def test_unknown_and_absent_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(device: str) -> None:
        prepare(FrameConfig.model_validate({"execution": {"device": device}}))

    with pytest.raises(UnknownPluginError, match="execution.device names an unknown platform 'cpuu'; did you mean 'cpu'") as caught:
        monkeypatch.setattr(preparing, "_describe", lambda error, registry: error)
        resolve("cpuu")
    assert "Installed: cpu, cuda" in str(caught.value)
    monkeypatch.setattr(preparing, "probe", lambda platforms: dataclasses.replace(probe(), note="no driver"))
    with pytest.raises(ResolveError, match=r"this machine has no usable cuda device \(no driver\)") as refused:
        resolve("cuda")
    assert refused.value.change == "execution.device: cpu"


def fails() -> UsableDevices:
    raise OSError("no driver")


def test_a_function_that_fails_finds_no_device_and_says_why() -> None:
    registry = load_registry(installed=False)
    part = registry.kind("platform", "theirs", "1.0")
    part.add("broken", fake_platform.FakePlatform, capabilities=PlatformCapabilities(find_devices=f"{__name__}:fails"))
    part.add("liar", fake_platform.FakePlatform, capabilities=fake_platform.CAPABILITIES)
    registry.commit(part)
    found = probe([registry.get("platform", name) for name in ("cpu", "broken", "liar")])
    assert found.accelerators == ()
    assert "platform broken cannot find its devices: OSError: no driver" in found.note
    assert "returns devices of kind fake" in found.note


def test_a_preferred_plugin_precedes_a_better_ranked_one(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    preferring = dataclasses.replace(fake_platform.CAPABILITIES, preferred=("grammar_backend/xgrammar",))
    monkeypatch.setattr(fake_platform, "CAPABILITIES", preferring)
    install(fake_platform)
    names = {
        device: prepare(FrameConfig.model_validate({"execution": {"device": device}})).resolved.plugins["grammar_backend"][0].name
        for device in ("cpu", "fake")
    }
    assert names["fake"] == "xgrammar" != names["cpu"]


def test_a_context_names_a_platform_of_its_device() -> None:
    import torch

    with pytest.raises(TypeError, match="a context on meta needs its platform"):
        RankContext(device=torch.device("meta"), dtype=torch.float32, tp=LocalGroup(), limits=Limits(1, 1, 1, 1))
