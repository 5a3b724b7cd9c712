"""Runs `pip install` with these arguments and shows its progress: for the Makefile, on a machine
that has nothing but Python.

    python scripts/install.py "torch>=2.11" --index-url https://download.pytorch.org/whl/cpu

Bars on a terminal, a line every ten seconds elsewhere. What pip prints is shown if it fails, unless
the first argument is --try.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # frame is not installed yet
sys.path.append(str(Path(sysconfig.get_path("purelib")) / "pip" / "_vendor"))  # with rich

from frame.host.progress import Advance, show_progress

POLL_SECONDS = 2.0  # a look at all installed files takes a tenth of a second
MIN_BYTES = 5_000_000  # of a file whose download has a bar of its own
SHOWN_LINES = 30  # of pip's output, where it fails
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)(?:\.metadata)? \(([\d.]+) ([kMG]?B)\)")
_STEP = re.compile(r"\s*(\w.*?)(?: \(pyproject\.toml\))?: started")  # such as a compilation
_FACTORS = {"B": 1, "kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}
_INSTALLING = "Installing collected packages: "


class Display:
    """Shows the phase that pip's lines tell: collecting, downloading a large file, a step such as a
    build, installing. `files`: pip's temporary folder. `packages`: the folder that it installs
    into."""

    def __init__(self, files: Path, packages: Path) -> None:
        self._files, self._packages = files, packages
        self._local: list[Path] = []  # wheels that are installed from where they are
        self._phase = ExitStack()
        self._advance: Advance = int
        self._is_collecting, self._collected = False, 0

    def start(self) -> None:
        """Begin: pip says nothing as long as an index does not answer, which may take minutes."""
        self._begin(show_progress("asking the package index"))

    def read_line(self, line: str) -> None:
        """Take a line of pip's output."""
        if line.startswith("Collecting "):
            self._collect()
        elif line.startswith("Processing ") and line.endswith(".whl"):
            self._local.append(Path(line.removeprefix("Processing ")))
        elif (match := _DOWNLOAD.match(line)) and (size := round(float(match[2]) * _FACTORS[match[3]])) >= MIN_BYTES:
            name = match[1].rpartition("/")[2]
            self._begin(follow_file(f"downloading {name.split('-')[0]}", self._files, name, size))
        elif match := _STEP.fullmatch(line):
            self._begin(show_progress(match[1][0].lower() + match[1][1:]))
        elif line.startswith(_INSTALLING):
            wheels = [*self._files.glob("*/*.whl"), *self._local]
            self._begin(follow_packages(self._packages, sum(map(_unpacked_size, wheels))))

    def _collect(self) -> None:
        self._collected += 1
        if self._is_collecting:
            self._advance(1)
        else:
            self._begin(show_progress("collecting packages"))
            self._is_collecting = True
            self._advance(self._collected)

    def _begin(self, phase: AbstractContextManager[Advance]) -> None:
        self.close()
        self._advance = self._phase.enter_context(phase)

    def close(self) -> None:
        """End the phase."""
        self._is_collecting = False
        self._phase.close()


@contextmanager
def _poll(measure: Callable[[], int], advance: Advance) -> Iterator[None]:
    """In the block, advance to the amount that `measure` returns."""
    has_ended = threading.Event()

    def run() -> None:
        last = 0
        while not has_ended.wait(POLL_SECONDS):
            now = max(last, measure())
            advance(now - last)
            last = now

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@contextmanager
def follow_file(title: str, folder: Path, name: str, size: int) -> Iterator[Advance]:
    """Show how much of a file below `folder` there is."""

    def measure() -> int:
        return max((min(size, _size(file)) for file in folder.glob(f"*/{name}")), default=0)

    with show_progress(title, size, "bytes") as advance, _poll(measure, advance):
        yield advance


@contextmanager
def follow_packages(folder: Path, total: int) -> Iterator[Advance]:
    """Show how many bytes of `total` have been added to `folder`."""
    before = _folder_size(folder)
    with show_progress("installing packages", total, "bytes") as advance, _poll(lambda: min(total, _folder_size(folder) - before), advance):
        yield advance


def _folder_size(folder: Path) -> int:
    """The bytes of the files below a folder."""
    return sum(_size(Path(place) / name) for place, _, names in os.walk(folder) for name in names)


def _unpacked_size(wheel: Path) -> int:
    """The bytes of a wheel's files, and as much again for those of Python, which pip compiles."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(file.file_size * (2 if file.filename.endswith(".py") else 1) for file in archive.infolist())


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # it has been moved
        return 0


def show(lines: Iterable[str], display: Display) -> list[str]:
    """Show the phases. -> the last lines."""
    last: list[str] = []
    display.start()
    for line in lines:
        last = [*last, line][-SHOWN_LINES:]
        display.read_line(line.rstrip("\n"))
    display.close()
    return last


def main(arguments: Sequence[str]) -> int:
    """Install. -> pip's exit code."""
    is_attempt = arguments[:1] == ["--try"]
    with tempfile.TemporaryDirectory(prefix="frame-install-") as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", *arguments[is_attempt:]]
        errors = subprocess.DEVNULL if is_attempt else None
        environment = {**os.environ, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace", env=environment) as process:
            assert process.stdout is not None
            last = show(process.stdout, Display(Path(folder), Path(sysconfig.get_path("purelib"))))
    if process.returncode and not is_attempt:
        sys.stderr.write("".join(last))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
