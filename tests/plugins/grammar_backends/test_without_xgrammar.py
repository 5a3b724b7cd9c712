"""The base installation, which lacks xgrammar: llguidance is chosen and serves all kinds of
grammars; the error of a backend asked for by name says how to get it."""

from __future__ import annotations

import json
import tomllib

import pytest
from packaging.requirements import Requirement

from frame import Engine, SamplingParams
from frame.config.selection import ResolveError
from frame.host.installation import install_command
from tests.architecture.source import ROOT
from tests.metadata import hide_distribution

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False})


@pytest.fixture(autouse=True)
def without_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_distribution(monkeypatch, "xgrammar")


def test_llguidance_is_a_dependency_and_xgrammar_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {Requirement(line).name for line in project["dependencies"]}
    assert "llguidance" in base
    assert "xgrammar" not in base
    assert [Requirement(line).name for line in project["optional-dependencies"]["xgrammar"]] == ["xgrammar"]


def test_llguidance_is_chosen_and_serves() -> None:
    requests = [SamplingParams(max_tokens=20, **each) for each in (
        {"json_schema": SCHEMA}, {"regex": "[ab]{2}"}, {"ebnf": 'root ::= "yes" | "no"'}, {"choice": ("red", "blue")},
        {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})},
    )]  # fmt: skip
    with Engine(sampling_grammar_workers=0, max_total_tokens=2048, max_model_len=256) as engine:
        schema, regex, ebnf, choice, tag = engine.generate(["a"] * len(requests), requests)
    assert schema.text in ('{"a":1}', '{"a":2}')
    assert set(regex.text) <= {"a", "b"}
    assert ebnf.text in ("yes", "no")
    assert choice.text in ("red", "blue")
    assert tag.text == "x"


@pytest.mark.parametrize("name", ["xgrammar", "combined"])
def test_a_backend_asked_for_by_name_says_how_to_install_it(name: str) -> None:
    with pytest.raises(ResolveError) as caught:
        Engine(grammar_backend=name)
    assert f"it needs xgrammar>=0.2, which is not installed ({install_command('xgrammar>=0.2')})" in str(caught.value)
