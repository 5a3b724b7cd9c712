"""The parsers' suites say skipped where they know no text, and take each text for what it is."""

from __future__ import annotations

import sys

import pytest

from frame.interfaces.parsing import CallRule, Format
from frame.testing.conformance import SkipCheck, run_suite
from frame.testing.contexts import PARSER
from frame.testing.parsing import reasoning_parser, tool_call_parser
from frame.testing.parsing import texts as parser_texts
from tests.testing.mutants import Mutant
from tests.testing.mutants.reasoning_parser import ThinkTags
from tests.testing.mutants.tool_call_parser import Hermes


class HasNoGrammar(Hermes):
    """Has calls that cannot be constrained."""

    def grammar(self, rule: CallRule) -> Format | None:  # type: ignore[override]
        return None


def test_what_cannot_be_known_is_skipped() -> None:
    outcomes = run_suite(Mutant("none", "tool_call_parser", lambda: HasNoGrammar, "").subject())
    found = {outcome.check: outcome.result for outcome in outcomes}
    assert found["known_calls_are_read"] == found["cut_calls_leave_no_content"] == "skipped"
    assert found["splits_change_nothing"] == "passed"
    assert "failed" not in found.values()


def test_without_xgrammar_known_texts_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    parser_texts._compiled.cache_clear()
    with pytest.raises(SkipCheck, match="is not installed"):
        tool_call_parser.check_known_calls_are_read(lambda: Hermes(PARSER))
    with pytest.raises(SkipCheck, match="is not installed"):
        reasoning_parser.check_known_replies_are_read(lambda: ThinkTags(PARSER))


def test_texts_are_drawn_from_a_format() -> None:
    texts = parser_texts.draw({"type": "regex", "pattern": "[ab]{3}"}, 5)
    assert len(texts) == 5
    assert all(len(text) == 3 and set(text) <= {"a", "b"} for text in texts)


def test_known_answers_cover_all_prompts() -> None:
    known = reasoning_parser.find_replies(lambda: ThinkTags(PARSER))
    assert {end for _, end, _ in known} == {*reasoning_parser.PROMPT_ENDS, "<think>"}
    assert any(parser_texts.THOUGHT in text for text, *_ in known)
