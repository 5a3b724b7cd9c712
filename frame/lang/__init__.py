"""The front-end language: programs of several generations, choices and branches as Python
functions.

    from frame.lang import assistant, function, gen, select, system, user

See docs/lang.md. A layer over `Engine`, `Client` and OpenAI endpoints; no part of the server uses
it.
"""

from frame.lang.backends import BackendError, OpenAI
from frame.lang.nodes import assistant, gen, image, select, system, user
from frame.lang.program import Program, function
from frame.lang.report import Trace, report
from frame.lang.state import Branches, Event, ProgramError, State, UnsupportedError

__all__ = [
    "BackendError", "Branches", "Event", "OpenAI", "Program", "ProgramError", "State", "Trace", "UnsupportedError",
    "assistant", "function", "gen", "image", "report", "select", "system", "user",
]  # fmt: skip
