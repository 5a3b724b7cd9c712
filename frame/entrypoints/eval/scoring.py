"""How an answer becomes right or wrong.

Chat tasks: the answer, stripped of white space around it, equals the expected text. Python completions: prompt and completion
together are cut at the last line end, and the rest must parse with `ast.parse`. Where it does not, and only because its last
statement is unfinished (an open bracket or string, or a block header without its block), that one statement is dropped too and
the rest must parse. At least one whole line of the completion must remain. Pure Python; knows no backend.
"""

import ast
import io
import tokenize

from frame.entrypoints.eval.tasks import Example

_UNFINISHED = (
    "was never closed",
    "unexpected EOF",
    "unterminated triple-quoted",
    "expected an indented block",
    "expected 'except' or 'finally' block",
)


def is_correct(example: Example, answer: str) -> bool:
    """Whether `answer` solves `example`."""
    if example.task == "python":
        return python_parses(example.prompt, answer)
    return answer.strip() == example.expected


def python_parses(prompt: str, completion: str) -> bool:
    """Whether prompt and completion are the beginning of a valid Python file, by the rule of this module."""
    text = (prompt + completion).rpartition("\n")[0] + "\n"
    if not text[len(prompt) :].strip():
        return False
    error = _syntax_error(text)
    if error is None:
        return True
    if not any(sign in error for sign in _UNFINISHED):
        return False
    kept = text[: _last_statement(text)]
    return bool(kept[len(prompt) :].strip()) and _syntax_error(kept) is None


def _syntax_error(text: str) -> str | None:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None


def _last_statement(text: str) -> int:
    """Where the last logical line of `text` begins, as an offset."""
    start_line, fresh = 1, True
    silent = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                fresh = True
            elif fresh and token.type not in silent:
                start_line, fresh = token.start[0], False
    except (tokenize.TokenError, IndentationError, SyntaxError) as error:
        position = error.args[1] if isinstance(error, tokenize.TokenError) else None
        if fresh and position:  # an open string yields no token: the error names where it begins
            start_line = position[0]
    lines = text.splitlines(keepends=True)
    return sum(len(line) for line in lines[: start_line - 1])
