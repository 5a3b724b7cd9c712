"""`Verdict`: what a comparison of a plugin with a reference plugin of its kind found. Used by
`frame.testing.compare` and the modules that compare one group of kinds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison on one subject, such as a model, found. `problem`: where the two differ;
    `skipped`: why they were not compared."""

    subject: str
    milliseconds: tuple[float, float] = (0.0, 0.0)  # the plugin's, the reference's
    problem: str = ""
    skipped: str = ""
    unit: str = "a step"  # what takes so many milliseconds

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.subject}: skipped: {self.skipped}"
        own, other = self.milliseconds
        return f"{self.subject}: {self.problem or 'equal'}; {own:.2f} ms {self.unit}, the reference {other:.2f} ms"
