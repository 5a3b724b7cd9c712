"""A third-party attention backend, from installation to serving. No module of frame names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLE, ROOT, Environment


@pytest.mark.slow
def test_it_is_listed_with_who_brought_it(environment: Environment) -> None:
    lines = environment.frame("plugins", "list").stdout.splitlines()
    (line,) = (line for line in lines if "blockwise" in line)
    assert "frame-attn-example 1.0.0" in line
    assert "attention_backend" in line


@pytest.mark.slow
def test_it_loads(environment: Environment) -> None:
    assert "loads" in environment.frame("plugins", "check", "blockwise").stdout


def test_it_is_not_visible_elsewhere() -> None:
    listed = subprocess.run([sys.executable, "-m", "frame", "plugins", "list"], capture_output=True, text=True, timeout=500, check=True)
    assert "torch_native" in listed.stdout
    assert "blockwise" not in listed.stdout


@pytest.mark.slow
def test_a_file_alone_chooses_it_with_its_options(environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "frame.yaml"
    file.write_text("attention: {backend: blockwise}\nplugins: {options: {attention_backend/blockwise: {block_tokens: 7}}}\n")
    checked = environment.frame("config", "check", "--config", file)
    assert "blockwise" in checked.stdout


@pytest.mark.slow
def test_auto_prefers_the_higher_rank(environment: Environment) -> None:
    assert "torch_native" in environment.frame("config", "explain", "attention.backend").stdout


@pytest.mark.slow
def test_a_wrong_option_is_one_sentence(environment: Environment) -> None:
    options = ("--attention-backend", "blockwise", "--set", "plugins.options.attention_backend/blockwise.block_tokns=7")
    done = environment.frame("config", "check", *options, check=False)
    assert done.returncode == 78
    assert "block_tokens" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_denied_it_is_gone(environment: Environment) -> None:
    done = environment.frame("config", "check", "--attention-backend", "blockwise", "--plugins-deny", "frame-attn-example", check=False)
    assert done.returncode == 78
    assert "blockwise" in done.stderr


@pytest.mark.slow
def test_its_schema_is_in_the_editors(environment: Environment) -> None:
    schema = json.loads(environment.frame("config", "schema").stdout)
    assert "block_tokens" in json.dumps(schema)


@pytest.mark.slow
def test_it_passes_conformance(environment: Environment, tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = environment.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--frame-conformance=attention_backend:blockwise", f"--frame-conformance-json={verdict}",
        "-c", EXAMPLE / "pyproject.toml", "--rootdir", tmp_path, tmp_path,
    )  # fmt: skip
    assert " passed" in done.stdout
    assert json.loads(verdict.read_text())


@pytest.mark.slow
def test_its_own_tests_pass(environment: Environment, tmp_path: Path) -> None:
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", EXAMPLE / "pyproject.toml", EXAMPLE / "tests")
    assert " passed" in done.stdout


def test_the_readme_of_the_package_says_what_is_so() -> None:
    text = (EXAMPLE / "README.md").read_text()
    assert "frame serve --attention-backend blockwise" in text
    assert (ROOT / "docs" / "write_a_plugin.md").read_text().count("frame-attn-example") >= 1
