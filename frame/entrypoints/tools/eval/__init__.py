"""`frame eval`: seeded tasks, scoring, and the evaluation of a backend."""

from frame.entrypoints.tools.eval.evaluate import EvalBackend, Outcome, Report, Score, evaluate
from frame.entrypoints.tools.eval.tasks import TASKS, Example, Message, make_example, make_examples

__all__ = [
    "TASKS",
    "EvalBackend",
    "Example",
    "Message",
    "Outcome",
    "Report",
    "Score",
    "evaluate",
    "make_example",
    "make_examples",
]
