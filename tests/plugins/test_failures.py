"""Failures of plugins at start: each names the plugin, its package and version, and what to do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from frame.core.errors import PluginError
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.runner import unwrap_runner
from frame.core.messages import Fatal
from frame.diagnostics.finite_check import check_finite
from frame.entrypoints.processes import worker
from frame.plugins.loader import load_registry
from tests.plugins.faulty import BASES, MODULE, OWNER, Faulty, boom, make_faulty, remedy


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    return make_faulty(tmp_path, monkeypatch)


class AtStart(NamedTuple):
    """A fault that stops the start: the kind, the member at fault, the function that is named, and
    when."""

    kind: str
    member: str
    phase: str
    function: str = "boom"


START = {
    **{f"constructing a {kind}": AtStart(kind, "__init__", "at start") for kind in BASES},
    "loading weights": AtStart("model", "load_weights", "at start"),
    "weights of a layer": AtStart("weight_format", "describe_layer", "at start"),
    "preparing a product": AtStart("gemm_kernel", "prepare", "at start"),
    "preparing kernels": AtStart("attention_backend", "prepare", "at start"),
    "planning in warm-up": AtStart("attention_backend", "plan", "in a warm-up step"),
    "attention in warm-up": AtStart("attention_backend", "run", "in a warm-up step"),
    "forward in warm-up": AtStart("model", "forward", "in a warm-up step"),
    "logits in warm-up": AtStart("model", "compute_logits", "in a warm-up step"),
    "experts in warm-up": AtStart("moe_runner", "run", "in a warm-up step"),
    "dispatch in warm-up": AtStart("moe_dispatcher", "dispatch", "in a warm-up step"),
    "combine in warm-up": AtStart("moe_dispatcher", "combine", "in a warm-up step"),
}


@pytest.mark.parametrize("name", START)
def test_a_failure_at_start_names_the_plugin_the_phase_and_the_remedy(name: str, faulty: Faulty) -> None:
    case = START[name]
    more = {"run_parts": boom} if (case.kind, case.member) == ("moe_runner", "run") else {}
    faulty.add(case.kind, **{case.member: boom}, **more)
    with pytest.raises(PluginError) as caught:
        faulty.start(case.kind)
    text = str(caught.value)
    assert text.startswith(f"{case.kind} 'faulty' {OWNER} failed in {case.function} {case.phase}: RuntimeError: boom ("), text
    assert text.endswith(f"; {remedy(case.kind)}.")
    assert caught.value.__cause__ is not None  # its traceback, for the log


NAN = {
    "attention_backend": ("run", "Faulty.run"),
    "moe_runner": ("run", "Faulty.run"),
    "moe_dispatcher": ("combine", "Faulty.combine"),
    "model": ("forward", "its output"),
}


@pytest.mark.parametrize("kind", NAN)
def test_not_a_number_in_warm_up_stops_the_start(kind: str, faulty: Faulty) -> None:
    member, place = NAN[kind]
    base = faulty.registry.load(faulty.registry.get(kind, BASES[kind]))
    right = getattr(base, member)
    wrong = lambda self, *arguments: right(self, *arguments) * float("nan")  # noqa: E731
    faulty.add(kind, **{member: wrong}, **({"run_parts": wrong} if kind == "moe_runner" else {}))
    with pytest.raises(PluginError) as caught:
        faulty.start(kind)
    text = str(caught.value)
    assert text.startswith(f"{kind} 'faulty' {OWNER} yields NaN or infinity in a warm-up step, in {place}"), text
    assert text.endswith(f"{remedy(kind)}.")


def test_products_that_a_gemm_kernel_makes_not_a_number_are_its_own(faulty: Faulty) -> None:
    base = faulty.registry.load(faulty.registry.get("gemm_kernel", "plain"))

    def prepare(self: Any, weight: Any) -> Any:
        weight.quantized.mul_(float("nan"))
        return base.prepare(self, weight)

    faulty.add("gemm_kernel", prepare=prepare)
    with pytest.raises(PluginError, match=r"yields NaN or infinity in a warm-up step, in layers\.0\."):
        faulty.start("gemm_kernel")


# loading ------------------------------------------------------------------------------------------


def test_a_class_that_disagrees_with_its_record_stops_the_start(faulty: Faulty) -> None:
    made = faulty.add("attention_backend")
    made.capabilities = dataclasses.replace(made.capabilities, sliding_window=not made.capabilities.sliding_window)  # type: ignore[attr-defined]
    with pytest.raises(PluginError) as caught:
        faulty.start("attention_backend")
    text = str(caught.value)
    assert text.startswith(f"attention_backend 'faulty' {OWNER}: {MODULE}:attention_backend and its record disagree: sliding_window is ")
    assert text.endswith("in the record. Register the class's own capabilities.")


def test_a_method_with_other_arguments_stops_the_start(faulty: Faulty) -> None:
    faulty.add("scheduling_policy", sort_waiting=lambda self, waiting: waiting)
    with pytest.raises(PluginError) as caught:
        faulty.start("scheduling_policy")
    words = f"scheduling_policy 'faulty' {OWNER}: {MODULE}:scheduling_policy.sort_waiting does not take (self, waiting, view) of"
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:Policy", "was selected but does not load from no_such_module:Policy: ModuleNotFoundError"),
        ("json:JSONDecoder", "json:JSONDecoder is no subclass of frame.core.interfaces.scheduling.SchedulingPolicy; derive it."),
        ("frame.core.interfaces.scheduling:SchedulingPolicy", "does not implement sort_waiting of scheduling_policy/"),
    ],
    ids=["import", "class", "abstract"],
)
def test_a_target_that_is_no_plugin_stops_the_start(target: str, words: str, faulty: Faulty) -> None:
    part = faulty.registry.kind("scheduling_policy", "theirs", "2.1")
    part.add("faulty", target)
    faulty.registry.commit(part)
    with pytest.raises(PluginError) as caught:
        faulty.start("scheduling_policy")
    assert str(caught.value).startswith(f"scheduling_policy 'faulty' {OWNER}")
    assert words in str(caught.value)


def test_a_plugin_that_one_process_misses_is_said(faulty: Faulty) -> None:
    faulty.add("scheduling_policy")
    choice = faulty.prepare("scheduling_policy").resolved.choice("scheduling_policy")
    with pytest.raises(PluginError) as caught:
        load_registry(installed=False).choose(choice)
    text = str(caught.value)
    assert text.startswith("scheduling_policy 'faulty' (theirs 2.1) is missing in this process: Unknown scheduling_policy 'faulty'")
    assert text.endswith("Start every process in the same environment.")


def test_the_process_that_misses_a_plugin_is_named(faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of rank 1 starts where the package is not installed."""
    faulty.add("scheduling_policy")
    resolved = faulty.prepare("scheduling_policy").resolved
    sent: list[Fatal] = []
    transport = types.SimpleNamespace(send=sent.append, close=lambda: None)
    monkeypatch.setattr(worker.Lines, "read_line", lambda _: resolved.model_dump_json().encode())
    monkeypatch.setattr(worker, "_transport", lambda *_: transport)
    for name in ("_watch_parent", "enable_stack_dumps"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker.logs, "configure", lambda *_: None)

    def follow(resolved: Any, *_: Any) -> None:
        load_registry(installed=False).choose(resolved.choice("scheduling_policy"))

    arguments = ["follower", "--sockets", str(tmp_path), "--parent", "1", "--rank", "1"]
    assert worker.main(arguments, {"follower": follow}) == 78
    assert sent[0].error.startswith("rank-1: scheduling_policy 'faulty' (theirs 2.1) is missing in this process: ")


def test_another_version_in_one_process_is_said(faulty: Faulty) -> None:
    faulty.add("scheduling_policy")
    choice = faulty.prepare("scheduling_policy").resolved.choice("scheduling_policy")
    with pytest.raises(PluginError, match=r"resolved as theirs 2\.0 .* but this process finds theirs 2\.1"):
        faulty.registry.choose(choice.model_copy(update={"version": "2.0"}))


def test_correct_plugins_yield_finite_results(faulty: Faulty) -> None:
    running = faulty.start()
    runner = running.engine.runner
    runner = unwrap_runner(runner)
    assert isinstance(runner, TorchModelRunner)
    check_finite(runner)
    running.close()


def test_a_choice_that_an_installed_package_moves_is_said_at_start(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    record = faulty.registry.get("attention_backend", "torch_native")
    part = faulty.registry.kind("attention_backend", "theirs", "2.1")
    part.add("better", record.target, capabilities=record.capabilities, rank=10_000)
    faulty.registry.commit(part)
    assert faulty.prepare().resolved.choice("attention_backend").name == "better"
    assert "attention.backend: auto chooses better because theirs 2.1 is installed; frame's own choice is torch_native" in caplog.text


def test_what_a_plugin_prints_in_a_process_goes_to_the_log() -> None:
    code = "from frame.entrypoints.processes import worker; worker.main = lambda **_: print('seen') or 0; worker.run_process()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True)
    assert (done.stdout, done.stderr) == ("", "seen\n")
