"""Moves the files of changelog/ into CHANGELOG.md as the notes of a release.

Run `python scripts/assemble_changelog.py VERSION` when the version is set, and commit the result.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

KINDS = ("added", "changed", "fixed", "removed")
_UNRELEASED = "## Unreleased\n"
_VERSION = re.compile(r"\d+\.\d+\.\d+[a-z0-9.]*")


def assemble(changelog: str, notes: Mapping[str, str], version: str) -> str:
    """The changelog with the notes, by file name, under this version. The section `Unreleased`
    becomes that of the version. Raises ValueError for another file name, an empty note, and a
    version that is there already."""
    if not _VERSION.fullmatch(version) or f"\n## {version}\n" in changelog:
        raise ValueError(f"the version is {version!r}; give a new one, such as 1.2.0")
    entries: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, text in sorted(notes.items()):
        kind = name.removesuffix(".md").rpartition(".")[2]
        if kind not in entries or not text.strip():
            raise ValueError(f"changelog/{name} is empty, or not named TOPIC.KIND.md with a kind of {', '.join(KINDS)}")
        entries[kind].append("- " + text.strip().replace("\n", "\n  ").replace("\n  \n", "\n\n"))
    parts = [f"### {kind.capitalize()}\n\n" + "\n".join(found) + "\n" for kind, found in entries.items() if found]
    head, mark, rest = changelog.partition(_UNRELEASED)
    if not mark:
        head, mark, rest = changelog.partition("\n## ")
        return f"{head.rstrip()}\n\n" + "\n".join((f"## {version}\n", *parts)) + mark + rest
    kept, mark, older = rest.partition("\n## ")
    return head + "\n".join((f"## {version}\n{kept}".rstrip() + "\n", *parts)) + mark + older


def main() -> None:
    root = Path(__file__).parents[1]
    files = [file for file in sorted((root / "changelog").glob("*.md")) if file.name != "README.md"]
    target = root / "CHANGELOG.md"
    try:
        target.write_text(assemble(target.read_text(), {file.name: file.read_text() for file in files}, *sys.argv[1:2] or [""]))
    except ValueError as error:
        sys.exit(str(error))
    for file in files:
        file.unlink()


if __name__ == "__main__":
    main()
