"""`Trace`: a program's steps as text or HTML, with times and token counts where it was run. Must
not know backends."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frame.lang.state import Entry, State

MAX_DETAIL = 72  # characters of a text that a line shows


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of a program in the order in which it appended them. `str()` prints them, notebooks
    show HTML."""

    name: str
    entries: Sequence[Entry]

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """(branch, kind, detail, measurements, place in the source) of each step."""
        for entry in self.entries:
            detail, figures, usage = " ".join(entry.detail.split()), "", entry.generated
            if usage is not None and usage.prompt_tokens:
                counts = f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated"
                figures = f"{entry.seconds:.2f} s, {counts}"
            yield entry.branch, entry.kind, detail[:MAX_DETAIL] + "…" * (len(detail) > MAX_DETAIL), figures, entry.where

    def __str__(self) -> str:
        lines = [self.name]
        for branch, kind, detail, figures, where in self.rows():
            indent, label = "  " * (1 + bool(branch) + branch.count(".")), f"[{branch}] " if branch else ""
            lines.append(f"{indent}{label}{kind} {detail}".rstrip() + (f"  -- {figures}" if figures else "") + f"  ({where})")
        return "\n".join(lines)

    def to_html(self) -> str:
        """A table, for notebooks and files."""
        head = "".join(f"<th>{title}</th>" for title in ("branch", "step", "detail", "measured", "source"))
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows())
        return f"<table><caption>{html.escape(self.name)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    _repr_html_ = to_html


def report(state: State, name: str = "run") -> Trace:
    """The steps of a finished run."""
    return Trace(name, state.runtime.entries)
