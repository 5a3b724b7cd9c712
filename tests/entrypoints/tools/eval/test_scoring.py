"""When an answer counts."""

from __future__ import annotations

import pytest

from frame.entrypoints.tools.eval.evaluate import is_correct, python_parses
from frame.entrypoints.tools.eval.tasks import Example


def test_exact_answers() -> None:
    example = Example("sum", ({"role": "user", "content": "1 + 1"},), "", "2", 8, 10)
    assert is_correct(example, "2")
    assert is_correct(example, " 2\n")
    assert not is_correct(example, "2.")
    assert not is_correct(example, "")


PROMPT = 'import os\n\n\ndef read(path):\n    """Read."""\n'


@pytest.mark.parametrize(
    "completion",
    [
        "    return path\n",
        "    return path\n    x = (",  # the cut-off line is left out
        "    x = 1\n    return call(\n        path,\n        1,\n",  # an open bracket: its statement is left out
        "    x = 1\n    if x:\n",  # a header without a block
        "    x = 1\n    try:\n        y = 2\n",  # a try without its except
        "    x = 1\n    for y in z:\n        # only a comment\n",
        '    x = 1\n    text = """open\n    string\n',
        "    try:\n        x = 1\n    except ValueError:\n        pass\n\n\nclass A:\n",
        "    pass\n\n\n@decorator\ndef f(\n    a,\n",
    ],
)
def test_parses(completion: str) -> None:
    assert python_parses(PROMPT, completion)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "\n\n",
        "    return path",  # no whole line
        "    if path:\n",  # nothing remains
        "    return path)\n",
        "    return = 1\n    x = 1\n",
        "  x\n      y\n",
        "    x = 'open\n    y = 1\n",
        "    x = (1 2)\n    y = (\n",
        "    if x:\n    y = 1\n    z = 2\n",  # a missing block is an error when something follows
        "    x = call(\n    y = 1\n    z = 2\n",  # never closed, and wrong inside
        "    x = \x00\n",
    ],
)
def test_does_not_parse(completion: str) -> None:
    assert not python_parses(PROMPT, completion)


def test_dispatches_on_the_task() -> None:
    example = Example("python", (), PROMPT, "", 8, 10)
    assert is_correct(example, "    return 1\n")
    assert not is_correct(example, "    return )\n")
