"""The text corpus: Python source of the standard library and of installed packages under permissive
licences.

It reads the packages of the running interpreter, so the corpus differs between machines; the
manifest lists what was used. Packages without a recognised permissive licence in their metadata are
skipped, and files that name a copyleft licence near the top. Licences are not checked further.
"""

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|0BSD|HPND|Unlicense|CC0|Zlib|MIT-CMU|NCSA)\b", re.IGNORECASE)
COPYLEFT = re.compile(r"\b(L?GPL|AGPL|GNU|MPL|Mozilla|EPL|CDDL|EUPL|CeCILL|Proprietary|NVIDIA|Commercial)\b|GPLv", re.IGNORECASE)
COPYLEFT_IN_FILE = re.compile(r"GNU (Lesser |Affero )?General Public|GPL-[23]|Mozilla Public|proprietary", re.IGNORECASE)

MAX_FILE_BYTES = 200_000
MIN_FILE_BYTES = 200
STDLIB_LEFT_OUT = {"test", "tests", "site-packages", "idle_test", "lib2to3", "__pycache__", "pydoc_data", "turtledemo"}


@dataclass(frozen=True, slots=True)
class Source:
    """One part of the corpus: what it is, under which licence, and how much of it was taken."""

    name: str
    version: str
    licence: str
    files: int
    bytes: int


def licence_of(distribution: metadata.Distribution) -> str:
    """The licence that the metadata states: SPDX expression, else classifiers, else the first line
    of the free text."""
    fields = distribution.metadata
    expression = (fields.get_all("License-Expression") or [""])[0]
    if expression:
        return expression
    classifiers = [line.rsplit("::", 1)[-1].strip() for line in fields.get_all("Classifier") or [] if line.startswith("License ::")]
    named = [line for line in classifiers if line != "OSI Approved"]
    if named:
        return "; ".join(named)
    return (fields.get_all("License") or [""])[0].strip().split("\n", 1)[0][:80]


def is_permissive(licence: str) -> bool:
    """True when the text names a permissive licence and no other kind."""
    return bool(PERMISSIVE.search(licence)) and not COPYLEFT.search(licence)


def readable_source(path: Path) -> str | None:
    """The file's text, or None where it is too short, too long, not UTF-8, generated data, or under
    a copyleft notice."""
    try:
        if not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if COPYLEFT_IN_FILE.search(text[:3000]):
        return None
    digits = sum(character.isdigit() for character in text)
    if digits > 0.15 * len(text) or len(text) > 90 * (text.count("\n") + 1) or not text.isascii():
        return None
    return text.replace("\r\n", "\n").replace("\t", "    ")


def _take(paths: Iterator[Path], limit: int) -> tuple[list[str], int]:
    texts: list[str] = []
    total = 0
    for path in paths:
        text = readable_source(path)
        if text is not None:
            texts.append(text)
            total += len(text)
        if total >= limit:
            break
    return texts, total


def _stdlib_paths() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts):
            yield path


def _package_paths(distribution: metadata.Distribution) -> Iterator[Path]:
    for file in sorted(distribution.files or [], key=str):
        if file.suffix == ".py":
            yield Path(str(distribution.locate_file(file)))


def collect(package_limit: int, total_limit: int) -> tuple[list[str], list[Source]]:
    """All source texts and what they came from: at most `package_limit` bytes of one package,
    `total_limit` in all."""
    version = sysconfig.get_python_version()
    texts, size = _take(_stdlib_paths(), total_limit)
    sources = [Source("python standard library", version, "PSF-2.0", len(texts), size)]
    seen: set[str] = {"frame"}
    found = sorted(metadata.distributions(), key=lambda item: (item.metadata["Name"] or "").lower())
    for distribution in found:
        name = (distribution.metadata["Name"] or "").lower()
        licence = licence_of(distribution)
        if not name or name in seen or not is_permissive(licence) or size >= total_limit:
            continue
        seen.add(name)
        package, length = _take(_package_paths(distribution), min(package_limit, total_limit - size))
        if package:
            texts += package
            size += length
            sources.append(Source(name, distribution.version, licence, len(package), length))
    return texts, sources


def manifest(sources: list[Source]) -> list[dict[str, object]]:
    """The sources as plain data for a JSON file."""
    return [asdict(source) for source in sources]
