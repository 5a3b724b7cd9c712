"""Programs over a fake backend: control flow against a direct implementation, branches, errors,
traces, batches."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from frame.lang import ProgramError, UnsupportedError, assistant, function, gen, image, report, select, system, user
from frame.lang.backends import Backend, Conversation, Generated
from frame.lang.nodes import DEFAULT_MAX_TOKENS
from frame.lang.program import used_features


def reply(prompt: Conversation, params: Mapping[str, Any]) -> str:
    """A text that depends on the whole prompt and all parameters."""
    if "choice" in params:
        return str(params["choice"][len(repr(prompt)) % len(params["choice"])])
    return hashlib.sha256(f"{prompt.text}|{prompt.messages}|{sorted(params.items())}".encode()).hexdigest()[:6]


class Value(str):
    """A generated value, told apart from an equal one."""

    __slots__ = ()


class Fake(Backend):
    """Answers by `reply`, after `delay` seconds; fails where the prompt holds "poison"."""

    name = "fake"
    features = frozenset({"role", "text", "regex", "schema", "choice", "logprob select", "continued message"})

    def __init__(self, delay: float = 0.0) -> None:
        self.delay, self.running, self.maximum, self.prompts = delay, 0, 0, list[Conversation]()
        self.is_closed = False

    async def generate(self, prompt: Conversation, params: Mapping[str, Any], on_text: Any) -> Generated:
        self.prompts.append(prompt)
        self.running += 1
        self.maximum = max(self.maximum, self.running)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.running -= 1
        if "poison" in repr(prompt):
            raise RuntimeError("the model choked")
        text = '{"ok": true}' if "json_schema" in params else reply(prompt, params)
        if on_text is not None:
            on_text(text)
        return Generated([text] * params.get("n", 1), "stop", 10, 4, 2)

    async def score(self, prompt: Conversation, choices: Sequence[str]) -> tuple[list[list[float]], Generated]:
        return [[-1.0 * len(choice)] * len(choice) for choice in choices], Generated([])

    async def close(self) -> None:
        self.is_closed = True


STEP = st.recursive(
    st.one_of(
        st.tuples(st.just("text"), st.text("abc ", min_size=1, max_size=4)),
        st.tuples(st.just("gen"), st.sampled_from(["x", "y", "z"])),
        st.tuples(st.just("select"), st.sampled_from(["x", "y"])),
        st.tuples(st.just("branch on"), st.sampled_from(["x", "y", "z"])),
    ),
    lambda inner: st.tuples(st.just("fork"), st.lists(inner, max_size=4), st.integers(1, 3)),
    max_leaves=8,
)


def interpret(s: Any, steps: Any) -> None:
    for step in steps:
        if step[0] == "text":
            s += step[1]
        elif step[0] == "gen":
            s += gen(step[1], max_tokens=4)
        elif step[0] == "select":
            s += select(step[1], ["one", "two", "three"], method="constrained")
        elif step[0] == "branch on":
            s += "even" if step[1] in s and len(str(s[step[1]])) % 2 == 0 else gen(step[1], max_tokens=5)
        else:
            branches = s.fork(step[2])
            for number, branch in enumerate(branches):
                branch += str(number)
                interpret(branch, step[1])
            branches.join()


def direct(text: str, values: dict[str, Any], steps: Any) -> str:
    """The same, call by call."""
    for step in steps:
        params: dict[str, Any] = {"max_tokens": 4}
        if step[0] == "text" or (step[0] == "branch on" and step[1] in values and len(str(values[step[1]])) % 2 == 0):
            text += step[1] if step[0] == "text" else "even"
            continue
        if step[0] == "fork":
            copies = [dict(values) for _ in range(step[2])]
            for number, copy in enumerate(copies):
                direct(text + str(number), copy, step[1])
            names = dict.fromkeys(name for copy in copies for name in copy)
            for name in names:
                if any(copy.get(name) is not values.get(name) for copy in copies):
                    values[name] = [copy.get(name) for copy in copies]
            continue
        if step[0] == "select":
            params = {"choice": ("one", "two", "three"), "temperature": 0.0}
        elif step[0] == "branch on":
            params = {"max_tokens": 5}
        values[step[1]] = Value(reply(Conversation(text), params))
        text += values[step[1]]
    return text


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=6))
def test_programs_equal_their_direct_implementation(steps: Any) -> None:
    @function
    def program(s: Any) -> None:
        interpret(s, steps)

    state = program.run(backend=Fake())
    values: dict[str, Any] = {}
    assert (direct("", values, steps), values) == (state.text, state.values)


def test_branches_run_side_by_side_and_end_with_the_program() -> None:
    @function
    def program(s: Any) -> None:
        for branch in s.fork(8):
            branch += gen("x")

    backend = Fake(0.1)
    program.run(backend=backend)
    assert (backend.maximum, backend.running, backend.is_closed) == (8, 0, True)


def test_an_error_names_function_line_and_branch() -> None:
    @function
    def program(s: Any) -> None:
        outer = s.fork(2)
        inner = outer[1].fork(2)
        inner[0] += "poison"
        inner[0] += gen("x")

    with pytest.raises(ProgramError, match=r"^program, line \d+, branch 1\.0: the model choked$") as found:
        program.run(backend=Fake())
    assert isinstance(found.value.__cause__, RuntimeError)
    backend = Fake(60.0)

    @function
    def slow(s: Any) -> None:
        s += gen("x", timeout=0.05)

    with pytest.raises(ProgramError, match=r"slow, line \d+: timed out"):
        slow.run(backend=backend)
    began = time.monotonic()
    with pytest.raises(ProgramError, match="program took longer than"):
        function(program_of_waiting).run(backend=backend, timeout=0.1)
    assert time.monotonic() - began < 30 and backend.running == 0


def program_of_waiting(s: Any) -> None:
    s += gen("x")
    s["x"]


program_of_waiting.__name__ = "program"


def test_what_a_program_may_not_append() -> None:
    for build, sentence in (
        (lambda: user(gen("x")), "generations belong in assistant"),
        (lambda: system(image("http://x/y.png")), "images belong in user"),
        (lambda: user(assistant("x")), "cannot hold assistant"),
        (lambda: gen("x", temprature=1), "no parameter 'temprature'"),
        (lambda: gen("x", temperature=-1.0), "temperature is -1"),
        (lambda: gen("x", regex="a", choices=["b"]), "exclude each other"),
        (lambda: select("x", []), "non-empty texts"),
        (lambda: select("x", ["a"], method="best"), "'logprob' or 'constrained'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build()

    @function
    def mixed(s: Any) -> None:
        s += "text"
        s += user("x")

    with pytest.raises(ValueError, match=r"mixed, line \d+: roles and plain text do not mix"):
        mixed.run(backend=Fake())

    @function
    def pictures(s: Any) -> None:
        s += user("See " + image("http://x/y.png"))

    with pytest.raises(UnsupportedError, match="pictures uses image, which backend fake does not support"):
        pictures.run(backend=Fake())
    with pytest.raises(TypeError, match="unexpected keyword argument 'topic'"):
        mixed.run(backend=Fake(), topic=1)
    with pytest.raises(TypeError, match="give an Engine, a Client or"):
        pictures.run(backend=object())

    @function
    def unknown(s: Any) -> None:
        s += gen("answer")
        s["anwser"]

    with pytest.raises(KeyError, match="answer"):
        unknown.run(backend=Fake())


class Verdict(BaseModel):
    ok: bool


@function
def child(s: Any) -> None:
    s += assistant(gen("inner", regex="[a-z]+"))


@function
def parent(s: Any, topic: str) -> None:
    s += user(topic)
    child(s)
    s += assistant("So " + gen("verdict", schema=Verdict))
    kind = s.call("kind", len, s["inner"])
    s += user(f"{kind}")
    s += assistant(gen("several", n=2))


def test_values_messages_and_nesting() -> None:
    state = parent.run(topic="cats", backend=Fake())
    assert state["verdict"] == Verdict(ok=True) and state["kind"] == 6 and len(state["several"]) == 2
    assert [message["role"] for message in state.messages] == ["user", "assistant", "assistant", "user", "assistant"]
    assert state.messages[2]["content"] == 'So {"ok": true}' and state.text.startswith("user: cats\nassistant: ")
    assert state.usage == {"prompt_tokens": 30, "cached_tokens": 12, "completion_tokens": 6}
    assert used_features(parent.function) == {"role", "regex", "schema"}
    text = str(report(state))
    assert "10 prompt tokens (4 cached), 2 generated" in text and "call kind = len()" in text
    assert "<td>gen</td><td>inner</td>" in report(state).to_html()


def test_a_trace_needs_no_model_and_calls_nothing() -> None:
    called: list[int] = []

    @function
    def program(s: Any) -> None:
        s += user("Hello")
        s += assistant(gen("name"))
        s.call("note", called.append, 1)
        for branch in s.fork(2):
            branch += assistant(select("kind", ["a", "b"]))

    lines = str(program.trace()).splitlines()
    assert called == [] and [line.split("  (")[0].strip() for line in lines] == [
        "program", "role user", "text Hello", "role assistant", "gen name", "call note = append()", "fork 2 branches",
        "[0] role assistant", "[0] select kind", "[1] role assistant", "[1] select kind",
    ]  # fmt: skip


def test_a_batch_is_bounded_sorted_by_prefix_and_keeps_its_order() -> None:
    @function
    def program(s: Any, text: str) -> None:
        s += text
        s += gen("x")

    texts = [f"{'ab'[number % 2]} {number}" for number in range(20)]
    backend = Fake(0.01)
    states = program.run_batch([{"text": text} for text in texts], backend=backend, concurrency=4)
    assert [state["x"] for state in states] == [reply(Conversation(text), {"max_tokens": DEFAULT_MAX_TOKENS}) for text in texts]
    assert backend.maximum <= 4
    first = [prompt.text[0] for prompt in backend.prompts]
    assert "".join(first[:8]) == "a" * 8 and "".join(first[-8:]) == "b" * 8
    mixed = [{"text": "fine"}, {"text": "poison"}]
    found = program.run_batch(mixed, backend=Fake(), return_errors=True, progress=True)
    assert found[0]["x"] and isinstance(found[1], ProgramError)
    with pytest.raises(ProgramError, match="the model choked"):
        program.run_batch(mixed * 8, backend=Fake())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("frame.lang")]
