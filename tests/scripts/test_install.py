"""What the Makefile's installation shows."""

from __future__ import annotations

import shutil
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts import install
from scripts.install import Display, show


class Shown:
    """In place of `show_progress`: what was shown, as (title, total, amounts)."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int | None, list[int]]] = []
        self.has_advanced = threading.Event()

    @contextmanager
    def show(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Any]:
        self.phases.append((title, total, []))

        def advance(amount: int) -> None:
            self.phases[-1][2].append(amount)
            if amount:
                self.has_advanced.set()

        yield advance


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    display = Shown()
    monkeypatch.setattr(install, "show_progress", display.show)
    monkeypatch.setattr(install, "POLL_SECONDS", 0.01)
    return display


def test_the_phases_of_an_installation(shown: Shown, tmp_path: Path) -> None:
    files, packages = tmp_path / "files", tmp_path / "packages"
    unpack = files / "pip-unpack-1"
    for folder in (unpack, packages):
        folder.mkdir(parents=True)
    local = tmp_path / "local-1.0-py3-none-any.whl"

    def wait() -> None:
        shown.has_advanced.clear()
        assert shown.has_advanced.wait(30)

    def lines() -> Iterator[str]:
        yield "Collecting torch>=2.11\n"
        yield "  Downloading torch-2.11.0-cp311-none-linux.whl.metadata (30 kB)\n"
        yield "  Downloading https://a.example/torch-2.11.0-cp311-none-linux.whl (12.5 MB)\n"
        (unpack / "torch-2.11.0-cp311-none-linux.whl").write_bytes(bytes(1000))
        wait()
        yield "Collecting sympy\n"
        yield "Collecting local\n"
        with zipfile.ZipFile(unpack / "torch-2.11.0-cp311-none-linux.whl", "w") as archive:
            archive.writestr("torch.py", bytes(3000))
        with zipfile.ZipFile(local, "w") as archive:
            archive.writestr("local.py", bytes(500))
        yield f"Processing {local}\n"
        yield "  Installing build dependencies: started\n"
        yield "  Installing build dependencies: finished with status 'done'\n"
        yield "  Building editable for frame-x86 (pyproject.toml): started\n"
        yield "Installing collected packages: torch, sympy, local\n"
        (packages / "torch.py").write_bytes(bytes(3000))
        wait()
        (packages / "__pycache__").mkdir()
        (packages / "__pycache__/torch.pyc").write_bytes(bytes(1000))
        wait()
        yield "Successfully installed torch-2.11.0\n"

    assert show(lines(), Display(files, packages))[-1] == "Successfully installed torch-2.11.0\n"
    assert [(title, total, sum(amounts)) for title, total, amounts in shown.phases] == [
        ("asking the package index", None, 0),
        ("collecting packages", None, 1),
        ("downloading torch", 12_500_000, 1000),
        ("collecting packages", None, 3),  # those before the download count
        ("installing build dependencies", None, 0),
        ("building editable for frame-x86", None, 0),
        ("installing packages", 7000, 4000),
    ]


def test_torch_comes_from_the_index_that_answers(tmp_path: Path) -> None:
    """Without PyTorch's own index, as behind a mirror of PyPI."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f"""#!/bin/sh
echo "$*" >> {log}
case "$*" in -) exit 1 ;; *--try*) exit 1 ;; esac
""")
    python.chmod(0o755)
    path = str(tmp_path / "bin")  # without nvidia-smi
    Path(path).mkdir()
    for name in ("sh", "uname", "dirname"):
        (Path(path) / name).symlink_to(str(shutil.which(name)))
    script = Path(install.__file__).with_name("install_torch.sh")
    done = subprocess.run(["sh", str(script), str(python)], env={"PATH": path}, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "installing torch from pip's index" in done.stderr
    tries = [line.partition("install.py ")[2] for line in log.read_text().splitlines()[1:]]
    assert [each.startswith("--try") for each in tries] == [True, True, False]
    assert tries[2] == "torch>=2.11"


@pytest.mark.parametrize(("status", "calls"), [(0, ""), (1, "-m venv")])
def test_an_environment_without_pip_is_made_again(tmp_path: Path, status: int, calls: str) -> None:
    """`make serve` was interrupted between the folder and its pip."""
    environment, python, log = tmp_path / "venv", tmp_path / "python", tmp_path / "log"
    (environment / "bin").mkdir(parents=True)
    for path, line in ((environment / "bin/python", f"exit {status}"), (python, f'echo "$*" > {log}')):
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    log.touch()
    make = ["make", "-C", str(Path(install.__file__).parents[1]), f"VENV={environment}", f"PYTHON={python}", f"{environment}/stamps/venv"]
    done = subprocess.run(make, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert log.read_text().partition(f" {environment}")[0].strip() == calls


@pytest.mark.slow
def test_what_pip_says_is_shown_if_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    missing = ["--no-index", "frame-no-such-package"]
    assert install.main(missing) == 1
    assert "No matching distribution found for frame-no-such-package" in capfd.readouterr().err
    assert install.main(["--try", *missing]) == 1
    assert capfd.readouterr().err == ""
