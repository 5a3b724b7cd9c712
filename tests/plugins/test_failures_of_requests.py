"""Failures of plugins while requests run: each names the plugin, its package and version, and what
to do, and ends no other request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.entrypoints.http.failures import failure
from frame.entrypoints.processes.grammar_process import compile_one
from tests.plugins.faulty import BASES, OWNER, Faulty, boom, make_faulty, remedy

MINE = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, custom={"shout": "very"})
OTHERS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    return make_faulty(tmp_path, monkeypatch)


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
    reply = failure(mine)
    assert (reply.status, reply.param) == (400, "shout")
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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])
def test_a_model_that_fails_for_one_token_ends_its_request_alone(is_decode: bool, overlap: bool, faulty: Faulty) -> None:
    base = faulty.registry.load(faulty.registry.get("model", BASES["model"]))
    poison: list[int] = []

    def forward(self: Any, batch: Any) -> Any:
        if poison and bool((batch.token_ids == poison[0]).any()):
            raise RuntimeError("boom")
        return base.forward(self, batch)

    faulty.add("model", forward=forward)
    running = faulty.start("model", overlap=overlap)
    asked = [OTHERS] * 4
    assert running.ask(*asked) == [(Finish("length"), 3)] * 4
    right = running.tokens()
    guilty = [[5 + i, *right[f"r{i}"][:-1]] for i in range(4)]  # a prompt repeats one token; the last output is not computed
    poison.append(next(t for t in guilty[1][is_decode : 1 + 2 * is_decode] if not any(t in guilty[i] for i in (0, 2, 3))))
    running.received.clear()
    ends = running.ask(*asked)
    assert ends[1][0].error is not None
    assert ends[1][0].error.startswith(f"the model failed on this request: model 'faulty' {OWNER} failed in ")
    assert [end for i, end in enumerate(ends) if i != 1] == [(Finish("length"), 3)] * 3
    got = running.tokens()
    assert {rid: got[rid] for rid in ("r0", "r2", "r3")} == {rid: right[rid] for rid in ("r0", "r2", "r3")}
    assert got.get("r1", []) == (right["r1"][: right["r1"].index(poison[0]) + 1] if is_decode else [])
    running.close()


def test_a_policy_that_fails_is_named_and_requests_keep_their_order(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    faulty.add("scheduling_policy", sort_waiting=boom)
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
