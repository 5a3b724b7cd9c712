"""Commands in sentences about missing packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from frame.host import installation
from frame.host.installation import IN_TREE_PACKAGES, install_command, suggest_cpu_kernels
from tests.architecture.source import ROOT


@pytest.fixture
def own_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose `pip` is the first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("pip", "python"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def test_every_package_of_the_repository_is_listed() -> None:
    assert sorted(IN_TREE_PACKAGES) == sorted(file.parent.name for file in (ROOT / "packages").glob("*/pyproject.toml"))


@pytest.mark.usefixtures("own_pip")
def test_a_requirement_is_quoted_for_the_shell() -> None:
    assert install_command("ray") == "pip install ray"
    assert install_command("xgrammar>=0.2") == "pip install 'xgrammar>=0.2'"
    assert install_command("frame-serve[grpc]") == "pip install 'frame-serve[grpc]'"


@pytest.mark.usefixtures("own_pip")
def test_a_package_of_ours_is_named_by_its_folder_in_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = ROOT / "packages"
    monkeypatch.chdir(ROOT)
    assert install_command("frame-gguf", packages=packages) == "pip install ./packages/frame-gguf"
    monkeypatch.chdir(tmp_path)
    assert install_command("frame-gguf", packages=packages) == f"pip install {packages}/frame-gguf"
    both = "pip install frame-gguf, or pip install ./packages/frame-gguf in a clone of frame"
    assert install_command("frame-gguf", packages=tmp_path) == both


def test_without_its_own_pip_on_the_path_the_interpreter_is_named(own_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/env")
    assert install_command("ray") == "/usr/bin/env -m pip install ray"
    (own_pip / "pip").unlink()
    assert install_command("ray") == "/usr/bin/env -m pip install ray"


@pytest.mark.parametrize(("flags", "is_installed"), [("sse4_2 avx", False), ("avx avx2 fma", False), ("avx avx2 fma", True)])
def test_cpu_kernels_are_suggested_where_they_run(
    flags: str, is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr(installation, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(installation, "is_installed", lambda name: is_installed and name == "frame-x86")
    suggestion = suggest_cpu_kernels()
    if "avx2" in flags and not is_installed:
        assert suggestion is not None
        assert suggestion.endswith(install_command("frame-x86"))
    else:
        assert suggestion is None
