"""A program that uses a generation before its value exists fails with a sentence, in every form of
the API; it never takes a branch silently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from frame.lang import assistant, function, gen, image, select, system, user
from frame.lang.nodes import Node
from frame.lang.state import MissingValueError, State
from tests.lang.test_program import Fake

NODES: dict[str, Node] = {
    "gen": gen("x"),
    "select": select("x", ["Yes", "No"]),
    "joined": "Is it? " + gen("x"),
    "role": assistant(gen("x")),
    "user": user("Yes"),
    "system": system("Yes"),
    "image": image("http://localhost/a.png"),
    "unnamed": gen(),
}
USES: dict[str, Callable[[Any], object]] = {
    "==": lambda value: value == "Yes",
    "!=": lambda value: value != "Yes",
    "reversed ==": lambda value: "Yes" == value,  # noqa: SIM300
    "in a list": lambda value: value in ["Yes", "No"],
    "as a condition": lambda value: 1 if value else 2,
    "not": lambda value: not value,
    "str": str,
    "f-string": lambda value: f"It says {value}.",
    "format": "It says {}.".format,
    "percent": lambda value: "It says %s." % value,  # noqa: UP031
    "len": len,
    "iteration": list,
    "None": lambda value: value == None,  # noqa: E711
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("node", NODES)
def test_a_node_has_no_value(node: str, use: str) -> None:
    with pytest.raises(TypeError, match=r"has no value: append it to the state"):
        USES[use](NODES[node])


def test_nodes_equal_nodes_and_have_a_repr() -> None:
    assert gen("x") == gen("x")
    assert gen("x") != gen("y")
    assert gen("x") != select("x", ["a"])
    assert "name='x'" in repr("Is it? " + gen("x"))
    with pytest.raises(TypeError, match=r"gen\('x'\) has no value: append it to the state \(s \+= …\), then read s\['x'\]"):
        bool(gen("x"))


def run_all(program: Any, **keywords: Any) -> list[Callable[[], object]]:
    """Every form of a run."""

    async def collect() -> list[Any]:
        return [event async for event in program.astream(backend=Fake(), **keywords)]

    return [
        lambda: program.run(backend=Fake(), **keywords),
        lambda: asyncio.run(program.arun(backend=Fake(), **keywords)),
        lambda: list(program.stream(backend=Fake(), **keywords)),
        lambda: asyncio.run(collect()),
        lambda: program.run_batch([keywords], backend=Fake()),
        lambda: program.trace(**keywords),
    ]


READS: dict[str, tuple[Callable[[State], object], type[Exception], str]] = {
    "before the generation": (lambda s: s["x"] == "Yes", MissingValueError, r"line \d+: s\['x'\] is read before it has a value; append"),
    "of another name": (lambda s: s["xy"], MissingValueError, "before it has a value"),
    "by number": (lambda s: s[0], MissingValueError, r"s\[0\] is read before it has a value"),  # type: ignore[index]
    "of the state": (lambda s: s == "Yes", TypeError, "a state is no value"),
    "state in a list": (lambda s: s == "Yes", TypeError, "a state is no value"),
    "state as a condition": (lambda s: 1 if s else 2, TypeError, "a state is no value"),
    "state as text": (lambda s: f"{s}", TypeError, "a state is no value"),
    "length of the state": (len, TypeError, "a state is no value"),
    "iteration of the state": (list, TypeError, "a state is no value"),
}


@pytest.mark.parametrize("form", range(6), ids=["run", "arun", "stream", "astream", "batch", "trace"])
@pytest.mark.parametrize("read", READS)
def test_a_read_before_the_value_is_an_error(read: str, form: int) -> None:
    act, kind, words = READS[read]

    @function
    def program(s: State) -> None:
        s += user("Is it?")
        act(s)
        s += assistant(gen("x"))

    with pytest.raises(kind, match=words):
        run_all(program)[form]()


def test_branches_say_where_the_value_is() -> None:
    @function
    def program(s: State, joins: bool) -> None:
        s += user("Is it?")
        branches = s.fork(2)
        for branch in branches:
            assert "x" not in branch
            branch += assistant(gen("x"))
            assert "x" in branch
        if joins:
            branches.join()
        assert len(s["x"]) == 2

    assert program.run(backend=Fake(), joins=True)["x"]
    with pytest.raises(MissingValueError, match=r"another branch has it; read it there, or call join\(\)"):
        program.run(backend=Fake(), joins=False)


def test_a_batch_with_errors_returned_keeps_them() -> None:
    @function
    def program(s: State) -> None:
        s += "Is it? "
        reply = gen("x")
        s += "yes" if reply == "Yes" else "no"

    (error,) = program.run_batch([{}], backend=Fake(), return_errors=True)
    assert isinstance(error, TypeError)
