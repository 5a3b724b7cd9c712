"""Parts of the pages that `scripts/generate_docs.py` writes. Must not know a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `make docs`; change the code it comes from, not this page. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"
