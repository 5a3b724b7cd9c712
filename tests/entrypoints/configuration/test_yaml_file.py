"""YAML with places: scalars as YAML 1.2 reads them, and a line for everything."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from frame.core.errors import ConfigError
from frame.entrypoints.configuration.yaml_file import parse_yaml, plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("off", "off"),
        ("yes", "yes"),
        ("n", "n"),
        ("12", 12),
        ("-3", -3),
        ("0x1F", 31),
        ("010", 10),
        ("12:30", "12:30"),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("null", None),
        ("~", None),
        ("", None),
        ('"12"', "12"),
        ("[1, off, {a: ~}]", [1, "off", {"a": None}]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    found = plain(parse_yaml(text, "x"))
    assert found == value
    assert type(found) is type(value)


def test_infinity() -> None:
    assert plain(parse_yaml(".inf", "x")) == math.inf


def test_every_value_has_its_line() -> None:
    root = parse_yaml("a:\n  b: 1\n\n  c:\n    d: [1,\n 2]\n", "f.yaml")
    assert root.value["a"].place == "f.yaml:1"
    assert root.value["a"].value["b"].place == "f.yaml:2"
    assert root.value["a"].value["c"].value["d"].place == "f.yaml:5"
    assert plain(root) == {"a": {"b": 1, "c": {"d": [1, 2]}}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "f.yaml:2: the key 'a' is given twice"),
        ("[{a: 1, a: 2}]", "f.yaml:1: the key 'a' is given twice"),
        ("a: [1\nb: 2", "not valid YAML"),
        ("a: !!python/name:os.system", "f.yaml:1: not valid YAML: could not determine a constructor"),
        ("a: \x00", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML: but found another document"),
        ("&a [*a]", "nested more than"),
        ("0x", None),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str | None) -> None:
    if words is None:
        assert plain(parse_yaml(text, "f.yaml")) == text
        return
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert words in str(caught.value)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BOMB, r"x:\d: more than 10000 values, including repetitions through aliases \(\*name\)"),
        ("a: " + "[" * 20_000, "nested more than 16 deep"),
        ("a: " + "{b: " * 5_000, "nested more than 16 deep"),
        ("a: &a [*a]", "nested more than 16 deep"),
        ("a: " + "9" * 5000, "x:1: the number has 5000 digits"),
        ("a: 0x" + "f" * 5000, "x:1: the number has 5000 digits"),
        ("# " + "x" * (1 << 18), "x: larger than 262144 bytes"),
    ],
    ids=["aliases", "lists", "mappings", "cycle", "digits", "hexadecimal", "size"],
)
def test_what_costs_more_than_a_configuration(text: str, sentence: str) -> None:
    since = time.process_time()
    with pytest.raises(ConfigError, match=sentence):
        parse_yaml(text, "x")
    assert time.process_time() - since < 5


def test_aliases_may_be_used() -> None:
    assert plain(parse_yaml("a: &x {b: 1}\nc: *x\n", "x")) == {"a": {"b": 1}, "c": {"b": 1}}
