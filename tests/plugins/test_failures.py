"""Failures of plugins: each names the plugin, its package and version, and what to do.

The plugins are in-tree ones with one fault each, registered by a package `theirs` of version 2.1.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from frame.core.config.schema import FrameConfig
from frame.core.engine import Engine
from frame.core.errors import PluginError
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.finite_check import check_finite
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import AnyMessage, Control, Fatal, Finish, Generate, StepTokens
from frame.entrypoints.configuration import prepare as preparing
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.http.failures import failure
from frame.entrypoints.processes import worker
from frame.entrypoints.processes.build_engine import build_engine
from frame.entrypoints.processes.grammar_process import compile_one
from frame.plugins import loader, manifests
from frame.plugins.loader import load_registry, observers
from frame.plugins.registry import Registry

MODULE = "theirs_faulty"
OWNER = "(theirs 2.1)"
BASES = {
    "model": "mixtral",
    "attention_backend": "torch_native",
    "weight_format": "none",
    "gemm_kernel": "plain",
    "moe_runner": "torch_native",
    "moe_dispatcher": "all_reduce",
    "scheduling_policy": "fcfs",
    "eviction_policy": "lru",
    "logits_processor": "logit-bias",
}
SECTIONS = {
    "model": ("model", "implementation"),
    "attention_backend": ("attention", "backend"),
    "weight_format": ("model", "quantization"),
    "gemm_kernel": ("model", "gemm_kernel"),
    "moe_runner": ("moe", "runner"),
    "moe_dispatcher": ("moe", "dispatcher"),
    "scheduling_policy": ("scheduler", "policy"),
    "eviction_policy": ("cache", "eviction"),
    "logits_processor": ("sampling", "processors"),
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
}


def boom(self: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError("boom")


def remedy(kind: str) -> str:
    key = ".".join(SECTIONS[kind])
    change = f"leave it out of {key}" if kind == "logits_processor" else f"name another plugin with {key}"
    return f"{change}, or report the fault to the authors of theirs"


class Faulty:
    """Registers one faulty plugin, selects it, and builds engines with it."""

    def __init__(self, folder: Path, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.module = module
        self.registry = load_registry(installed=False)
        monkeypatch.setattr(preparing, "registry_of", lambda *_: self.registry)

    def add(self, kind: str, **members: Any) -> type:
        """Register the in-tree plugin of this kind with other members."""
        record = self.registry.get(kind, BASES[kind])
        base = self.registry.load(record)
        made = type("Faulty", (base,), {"__module__": MODULE, **{name: _placed(value) for name, value in members.items()}})
        setattr(self.module, kind, made)
        part = self.registry.kind(kind, "theirs", "2.1")
        part.add("faulty", f"{MODULE}:{kind}", capabilities=record.capabilities)
        self.registry.commit(part)
        return made

    def prepare(self, *kinds: str) -> Prepared:
        config: dict[str, Any] = {
            "model": {"path": str(self.folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"},
            "scheduler": {"max_running_requests": 4, "chunked_prefill_size": 64},
            "cache": {"max_total_tokens": 256},
            "execution": {"device": "cpu", "threads": 1},
        }
        for kind in kinds:
            section, name = SECTIONS[kind]
            config.setdefault(section, {})[name] = ["faulty"] if kind == "logits_processor" else "faulty"
        return prepare(FrameConfig.model_validate(config))

    def start(self, *kinds: str) -> Running:
        prepared = self.prepare(*kinds)
        return Running(prepared)


def _placed(value: Any) -> Any:
    """The member as if it were written in the plugin's module."""
    if isinstance(value, types.FunctionType):
        named = {**value.__globals__, "__name__": MODULE}
        placed = types.FunctionType(value.__code__, named, value.__name__, value.__defaults__, value.__closure__)
        placed.__kwdefaults__ = value.__kwdefaults__
        return placed
    return value


class Running:
    """An engine that a test drives step by step in its own thread."""

    def __init__(self, prepared: Prepared) -> None:
        self.received: list[AnyMessage] = []
        self.near, far = InProcessTransport.pair(self.received.append)
        self.engine: Engine = build_engine(prepared.resolved, prepared.registry, far)[0]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except Exception:
            return

    def ask(self, *params: SamplingParams) -> list[tuple[Finish, int]]:
        """How requests with these parameters end, sent at once, and how many tokens each got."""
        messages = [Generate(rid=f"r{i}", token_ids=[5 + i] * 40, params=each) for i, each in enumerate(params)]
        self.near.send_all(messages)
        deadline = time.monotonic() + 60
        finishes: dict[str, Finish] = {}
        while len(finishes) < len(messages) and time.monotonic() < deadline and not self.fatal():
            time.sleep(0.005)
            for message in [m for m in self.received if isinstance(m, StepTokens)]:
                finishes |= {message.rids[i]: finish for i, finish in message.finishes.items()}
        counts = {m.rid: 0 for m in messages}
        for message in [m for m in self.received if isinstance(m, StepTokens)]:
            for rid, tokens in zip(message.rids, message.token_ids, strict=True):
                counts[rid] += len(tokens)
        return [(finishes[m.rid], counts[m.rid]) for m in messages if m.rid in finishes]

    def fatal(self) -> str | None:
        return next((m.error for m in self.received if isinstance(m, Fatal)), None)

    def close(self) -> None:
        self.near.send(Control(id="close", action="shutdown"))
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    module = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    yield Faulty(tmp_path, module, monkeypatch)


# at start -----------------------------------------------------------------------------------------


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
        weight.codes.mul_(float("nan"))
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
    faulty.add("scheduling_policy", order=lambda self, waiting: waiting)
    with pytest.raises(PluginError) as caught:
        faulty.start("scheduling_policy")
    words = f"scheduling_policy 'faulty' {OWNER}: {MODULE}:scheduling_policy.order does not take (self, waiting, view) of"
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:Policy", "was selected but does not load from no_such_module:Policy: ModuleNotFoundError"),
        ("json:JSONDecoder", "json:JSONDecoder is no subclass of frame.core.interfaces.scheduling.SchedulingPolicy; derive it."),
        ("frame.core.interfaces.scheduling:SchedulingPolicy", "does not implement order of scheduling_policy/"),
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
    monkeypatch.setattr(worker, "_read_first_line", lambda: resolved.model_dump_json().encode())
    monkeypatch.setattr(worker, "_transport", lambda *_: transport)
    for name in ("_watch_parent", "enable_stack_dumps"):
        monkeypatch.setattr(worker, name, lambda: None)
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


# requests -----------------------------------------------------------------------------------------

MINE = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, custom={"shout": "very"})
OTHERS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def applies(self: Any, params: SamplingParams) -> bool:
    return bool(params.custom)


def nothing(self: Any, *arguments: Any) -> None:
    return None


QUIET = {"applies_to": applies, "add_slot": nothing, "apply": nothing, "observe_tokens": nothing, "remove_slot": nothing}


def run_two(faulty: Faulty, **members: Any) -> list[tuple[Finish, int]]:
    """How a request that the faulty logits processor applies to ends, and one beside it."""
    faulty.add("logits_processor", **{**QUIET, **members})
    running = faulty.start("logits_processor")
    try:
        return running.ask(MINE, OTHERS)
    finally:
        running.close()


def test_a_parameter_that_a_plugin_refuses_is_answered_with_400_and_the_field(faulty: Faulty) -> None:
    def validate(self: Any, params: SamplingParams) -> None:
        raise ValueError(f"shout is {params.custom['shout']!r}; it must be a number")

    (mine, tokens), other = run_two(faulty, validate_params=validate)
    assert (mine.error, mine.code, mine.param, tokens) == ("shout is 'very'; it must be a number", "invalid_request", "shout", 0)
    answer = failure(mine)
    assert (answer.status, answer.param) == (400, "shout")
    assert other == (Finish("length"), 3)


@pytest.mark.parametrize("member", ["validate_params", "applies_to", "add_slot", "apply", "observe_tokens"])
def test_a_fault_on_one_request_ends_that_request_alone(member: str, faulty: Faulty) -> None:
    fail: Callable[..., Any] = boom
    if member == "applies_to":

        def fail(self: Any, params: SamplingParams) -> bool:
            return bool(params.custom) and boom(self)

    (mine, _), other = run_two(faulty, **{member: fail})
    assert mine.reason == "error"
    assert mine.error == (
        f"logits_processor 'faulty' {OWNER} failed on this request: RuntimeError: boom; send it without the parameters of this logits "
        "processor"
    )
    assert other == (Finish("length"), 3)


def test_a_slot_that_cannot_be_removed_harms_no_request(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    faulty.add("logits_processor", **{**QUIET, "remove_slot": boom})
    running = faulty.start("logits_processor")
    assert [finish.reason for finish, _ in running.ask(MINE)] == ["length"]
    running.received.clear()
    assert [finish.reason for finish, _ in running.ask(OTHERS)] == ["length"]
    running.close()
    assert f"logits_processor 'faulty' {OWNER} failed on this request" in caplog.text


SERVING = {
    "forward": ("model", "forward"),
    "plan": ("attention_backend", "plan"),
    "attention": ("attention_backend", "run"),
    "experts": ("moe_dispatcher", "dispatch"),
}


@pytest.mark.parametrize("name", SERVING)
def test_a_failed_step_names_the_plugin(name: str, faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    kind, member = SERVING[name]
    base = faulty.registry.load(faulty.registry.get(kind, BASES[kind]))
    right, fails = getattr(base, member), []

    def sometimes(self: Any, *arguments: Any) -> Any:
        return right(self, *arguments) if not fails else fails[0](self)

    faulty.add(kind, **{member: sometimes})
    running = faulty.start(kind)
    fails.append(boom)
    ((finish, _),) = running.ask(OTHERS)
    fails.clear()
    assert finish.error is not None
    assert f"{kind} 'faulty' {OWNER} failed in " in finish.error
    assert finish.error.endswith(f"RuntimeError: boom; {remedy(kind)}")
    assert f"{kind} 'faulty' {OWNER}" in caplog.text
    running.received.clear()
    assert running.ask(OTHERS) == [(Finish("length"), 3)]  # the engine goes on
    running.close()


def test_correct_plugins_yield_finite_results(faulty: Faulty) -> None:
    running = faulty.start()
    assert isinstance(running.engine.runner, TorchModelRunner)
    check_finite(running.engine.runner)
    running.close()


def test_a_policy_that_fails_is_named_and_requests_keep_their_order(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    faulty.add("scheduling_policy", order=boom)
    running = faulty.start("scheduling_policy")
    assert running.ask(OTHERS) == [(Finish("length"), 3)]
    running.close()
    assert f"scheduling_policy 'faulty' {OWNER}, asked for an order, failed (RuntimeError: boom)" in caplog.text
    assert remedy("scheduling_policy") in caplog.text


def test_an_eviction_policy_that_fails_is_named_and_the_engine_goes_on(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    faulty.add("eviction_policy", key=boom)
    running = faulty.start("eviction_policy")
    for _ in range(2):
        running.received.clear()
        assert running.ask(OTHERS) == [(Finish("length"), 3)]
    assert running.fatal() is None
    running.close()
    assert caplog.text.count(f"eviction_policy 'faulty' {OWNER}, asked for a key, failed (RuntimeError: boom)") == 1
    assert remedy("eviction_policy") in caplog.text


def test_a_grammar_backend_that_fails_is_named() -> None:
    class Backend:
        compile = boom
        dump = boom

    is_well, sentence = compile_one(Backend(), "regex", "a")  # type: ignore[arg-type]
    assert (is_well, sentence) == (False, f"regex does not compile with {__name__}.{Backend.__qualname__}: RuntimeError: boom".encode())


# manifests and observers --------------------------------------------------------------------------


class Owner(NamedTuple):
    """What the loader reads of an installed distribution."""

    name: str = "theirs"
    version: str = "2.1"


HOOK = "from frame import hookimpl\n@hookimpl\ndef {name}({arguments}):\n    {body}\n"


def read(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, **arguments: Any) -> Registry:
    """The registry with an installed package whose manifest has this text."""
    (folder / "theirs_manifest.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "theirs_manifest", raising=False)
    found = [*loader._entry_points(), (Owner(), EntryPoint("theirs", "theirs_manifest", "frame"))]
    monkeypatch.setattr(loader, "_entry_points", lambda: found)
    monkeypatch.setattr(loader, "version", lambda name: "2.1")
    return load_registry(**arguments)


def test_a_manifest_that_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (broken,) = read(tmp_path, monkeypatch, "raise SystemExit(3)").broken
    assert str(broken).startswith("theirs 2.1 (entry point theirs = theirs_manifest): SystemExit: 3 (")


def test_a_manifest_that_hangs_is_named_after_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifests.HANG_SECONDS == 10
    code = (
        "import time\nfrom frame.plugins import manifests\nmanifests.HANG_SECONDS = 0.1\n"
        "with manifests.guarded('theirs 2.1'):\n    time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 78
    assert done.stderr == (
        "frame: theirs 2.1 has not been read after 0.1 s; update or uninstall the package, or exclude it with plugins.deny\n"
    )


def test_a_slow_manifest_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert manifests.SLOW_SECONDS == 1
    monkeypatch.setattr(manifests, "SLOW_SECONDS", 0.05)
    read(tmp_path, monkeypatch, "import time; time.sleep(0.1)\n" + HOOK.format(name="on_stop", arguments="", body="pass"))
    assert "theirs 2.1 (entry point theirs = theirs_manifest) takes 0.1 s to import" in caplog.text


def test_what_a_manifest_prints_does_not_reach_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, monkeypatch, "print('hello')\n" + HOOK.format(name="on_stop", arguments="", body="pass"))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hello\n")


@pytest.mark.parametrize("arguments", [{"deny": ["theirs"]}, {"allow": ["others"]}], ids=["denied", "not allowed"])
def test_denied_is_said_as_denied(arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = read(tmp_path, monkeypatch, "raise RuntimeError", **arguments)
    assert registry.broken == []  # not even imported
    words = r"plugins\.allow or plugins\.deny excludes these packages, which may contain it: (frame-automata, )?theirs\."
    with pytest.raises(PluginError, match=words):
        registry.get("scheduling_policy", "fair")


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_request_finished", "on_stop"])
def test_an_observer_that_fails_is_named_and_switched_off(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = read(tmp_path, monkeypatch, HOOK.format(name=event, arguments="", body="raise RuntimeError('boom')"))
    observe = getattr(observers(registry), event)
    observe()
    observe()
    (named,) = [line for line in caplog.messages if "observer" in line]
    assert named == (
        f"observer {event} of theirs 2.1 raised and is switched off until the next start; update or uninstall the package, or exclude it "
        "with plugins.deny"
    )


def test_a_choice_that_an_installed_package_moves_is_said_at_start(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    record = faulty.registry.get("attention_backend", "torch_native")
    part = faulty.registry.kind("attention_backend", "theirs", "2.1")
    part.add("better", record.target, capabilities=record.capabilities, rank=10_000)
    faulty.registry.commit(part)
    assert faulty.prepare().resolved.choice("attention_backend").name == "better"
    assert "attention.backend: auto chooses better because theirs 2.1 is installed; frame's own choice is torch_native" in caplog.text
