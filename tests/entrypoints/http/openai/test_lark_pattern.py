from __future__ import annotations

import re

import pytest

from frame.entrypoints.http.openai.lark_pattern import MAX_CHARS, LarkError, to_pattern

PATCH = """start: begin hunk+ end?
begin: "*** Begin" LF  // a comment
hunk: "@@ " /(.+)/ LF
    | ("+" | "-") /(.*)/ LF -> line
end: "*** End" LF?
%import common.LF
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (PATCH, ["*** Begin\n@@ a\n+b\n-\n", "*** Begin\n+b\n*** End"], ["*** Begin\n", "*** Begin\n@@ \n", "*** begin\n+\n"]),
        (
            'start: "SELECT"i NAME ["," NAME]\nNAME: /[a-z]+/\n%ignore " "',
            ["select a", "SELECT  a , b", "selecta"],
            ["select a b", "select"],
        ),
        ('?start: INT ("+" INT)~1..2\n%import common (INT, WS)\n%ignore WS', ["1 + 2", "1+2+3"], ["1", "1+2+3+4"]),
        ('start: "a".."c" X\nX.2: /x\\/y/i', ["bX/y"], ["dx/y", "bx"]),
        ('start: "\\n" /[^\\n]/', ["\na"], ["a"]),
    ],
)
def test_patterns(grammar: str, texts: list[str], others: list[str]) -> None:
    pattern = to_pattern(grammar)
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert not any(re.fullmatch(pattern, text) for text in others)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("start: a\na: b\nb: a?", "the rule 'a' refers to itself"),
        ("start: a", "no rule 'a'"),
        ("a: /a/", "no rule start"),
        ("start: /a/ §", "'§', which is not supported"),
        ("%extend start: /a/", "%extend, which is not supported"),
        ("%import python.NAME\nstart: NAME", "another module than common"),
        ("%import common.NONE\nstart: NONE", "common.NONE, which is not supported"),
        ("start: " + "(" * 80 + ")" * 80, "nested deeper"),
        ("start: /a/" + " " * MAX_CHARS, "characters; it may have"),
        ("start: a\n" + "".join(f"{chr(97 + i)}: {chr(98 + i) * 2}{' ' + chr(98 + i)} {chr(98 + i)}\n" for i in range(3)), "no rule"),
        ("start: x0\n" + "".join(f"x{i}: x{i + 1} x{i + 1}\n" for i in range(40)) + 'x40: "a"', "characters with its rules written out"),
    ],
)
def test_grammars_that_are_refused(grammar: str, says: str) -> None:
    with pytest.raises(LarkError, match=re.escape(says)):
        to_pattern(grammar)
