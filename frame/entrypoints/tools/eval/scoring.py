"""Scores answers.

Chat tasks: the answer without surrounding white space equals the expected text. Python completions:
prompt and completion are cut at the last line end; while the parser reports an incomplete program
(an open bracket or string, a header without a block), the last line is dropped. The rest must parse
and contain at least one line of the completion. Must not know a backend.
"""

import ast
import warnings

from frame.entrypoints.tools.eval.tasks import Example

_ALLOW_INCOMPLETE_INPUT = 0x4000  # CPython's flag of that name, which only `codeop` exports, undocumented
_PARSE_ONLY = ast.PyCF_ONLY_AST | _ALLOW_INCOMPLETE_INPUT


def is_correct(example: Example, answer: str) -> bool:
    """Whether `answer` solves `example`."""
    if example.task == "python":
        return python_parses(example.prompt, answer)
    return answer.strip() == example.expected


def python_parses(prompt: str, completion: str) -> bool:
    """Whether prompt and completion are the beginning of a valid Python file, as defined above."""
    lines = (prompt + completion).split("\n")[:-1]
    while True:
        text = "\n".join([*lines, ""])
        if not text[len(prompt) :].strip():
            return False
        error = _syntax_error(text)
        if error is None:
            return True
        if "incomplete input" not in error:
            return False
        lines.pop()


def _syntax_error(text: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape in a string is not a syntax error
            compile(text, "completion", "exec", flags=_PARSE_ONLY, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None
