"""`frame NAME` for a NAME that is no command says what to do."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from frame.entrypoints.cli import main
from frame.entrypoints.cli.installed import PACKAGES
from frame.host.installation import install_command
from tests.architecture.source import ROOT


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "load_command", lambda name, paths: None)
    monkeypatch.setattr(main, "list_help", lambda paths: [])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("serv", "No such command 'serv'; did you mean 'serve'?"),
        ("plugin", "No such command 'plugin'; did you mean 'plugins'?"),
        ("quantise", "No such command 'quantise'; did you mean 'quantize'?"),
        ("xyz", "No such command 'xyz'; frame --help lists the commands."),
        (
            "quantize",
            f"frame quantize is in the package frame-quantize, which is not installed; run {install_command('frame-quantize')}",
        ),
    ],
)
def test_the_remedy_is_named(name: str, sentence: str) -> None:
    result = CliRunner().invoke(main.cli, [name, "x", "--y"])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"Error: {sentence}"


def test_the_packages_bring_these_commands() -> None:
    for name, package in PACKAGES.items():
        assert f"\n{name} = " in (ROOT / "packages" / package / "pyproject.toml").read_text().partition("entry-points.frame_commands]")[2]
