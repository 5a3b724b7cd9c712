"""Release notes from the files of changelog/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.assemble_changelog import assemble

ROOT = Path(__file__).parents[2]
HEAD = "# Changes\n\nAbout versions.\n"
NOTES = {"b.fixed.md": "A second\nline.\n", "a.added.md": "New.\n", "a.fixed.md": "First.\n\nNext.\n"}
SECTIONS = "### Added\n\n- New.\n\n### Fixed\n\n- First.\n\n  Next.\n- A second\n  line.\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "\n## 1.0.0\n\n"),
        ("\n## 0.9.0\n\n- Old.\n", "\n## 1.0.0\n\n"),
        ("\n## Unreleased\n\nThe first.\n\n## 0.9.0\n\n- Old.\n", "\n## 1.0.0\n\nThe first.\n\n"),
    ],
)
def test_notes_are_listed_by_kind_before_older_versions(before: str, after: str) -> None:
    older = "\n## 0.9.0\n\n- Old.\n" if "0.9.0" in before else ""
    assert assemble(HEAD + before, NOTES, "1.0.0") == HEAD + after + SECTIONS + older


def test_every_note_of_the_folder_is_in_the_release() -> None:
    notes = {file.name: file.read_text() for file in (ROOT / "changelog").glob("*.md") if file.name != "README.md"}
    whole = assemble((ROOT / "CHANGELOG.md").read_text(), notes, "99.0.0")
    words = re.sub(r"\s+", " ", whole)
    assert all(re.sub(r"\s+", " ", text).strip() in words for text in notes.values())
    assert "Unreleased" not in whole and whole.count("\n## 99.0.0\n") == 1


@pytest.mark.parametrize(
    ("notes", "version", "message"),
    [
        ({"a.new.md": "x"}, "1.0.0", "changelog/a.new.md is empty, or not named TOPIC.KIND.md"),
        ({"a.fixed.md": "\n"}, "1.0.0", "changelog/a.fixed.md is empty"),
        (NOTES, "0.9.0", "the version is '0.9.0'; give a new one"),
        (NOTES, "next", "the version is 'next'"),
    ],
)
def test_wrong_notes_and_versions_are_refused(notes: dict[str, str], version: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        assemble(f"{HEAD}\n## 0.9.0\n\n- Old.\n", notes, version)
