"""Failures of requests, of their preparation and of their sequences, as the `ApiError` that a
client receives. Must not depend on a route."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from frame.core.messages import Finish
from frame.entrypoints.engine_client.limits import ContextLengthError, EngineDeadError, InvalidRequestError
from frame.entrypoints.engine_client.quotas import QuotaExceededError
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.http.errors import CONTEXT_LENGTH, RETRY_AFTER, ApiError, public
from frame.text.chat_template import ChatTemplateError


def raise_failed(sequences: Sequence[SequenceState]) -> None:
    """Raise ApiError for the first sequence that ended with an error."""
    for sequence in sequences:
        if sequence.finish is not None and sequence.finish.reason == "error":
            raise failure(sequence.finish, sequence.request.sent_name)


def error_event(sequence: SequenceState) -> bytes | None:
    """The event of a sequence that ended with an error; None for any other."""
    if sequence.finish is None or sequence.finish.reason != "error":
        return None
    return b"data: " + failure(sequence.finish, sequence.request.sent_name).body() + b"\n\n"


def failure(finish: Finish, sent_name: Callable[[str], str] = str) -> ApiError:
    """The error of a sequence, with the status of its code. `sent_name`: see `as_sent`."""
    sentence = finish.error or "the request failed"
    if finish.code == "queue_full":
        return ApiError(503, sentence, code="queue_full", retry_after=RETRY_AFTER)
    if finish.code == "deadline_exceeded":
        return ApiError(504, sentence, code="deadline_exceeded")
    if finish.code == "invalid_grammar":
        kind = finish.param or ""
        name = sent_name(kind) or None
        return ApiError(400, public(sentence.replace(f"invalid grammar: {kind} ", f"invalid grammar: {name} ")), name)
    if finish.code == "invalid_request":
        return ApiError(400, public(sentence), finish.param)
    return ApiError(500, sentence)


def aborted() -> ApiError:
    """The error of a request that was aborted, where its response has no other form for that."""
    return ApiError(503, "the request was aborted before it was finished; send it again", code="aborted")


def too_many(error: QuotaExceededError) -> ApiError:
    """The refusal of a request whose key has all that it may."""
    if error.is_permanent:
        return ApiError(400, str(error), "n")
    return ApiError(429, str(error), code="too_many_requests_of_key", retry_after=RETRY_AFTER)


def as_api_error(error: BaseException) -> BaseException:
    """The `ApiError` of an exception that stopped a request's start, or the exception."""
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), error.param, CONTEXT_LENGTH if isinstance(error, ContextLengthError) else None)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, public(str(error)), "messages")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), retry_after=RETRY_AFTER)
    return error


PROSE = ("prompt", "input")  # names of parameters that sentences use as words


def as_sent(error: BaseException, sent_name: Callable[[str], str]) -> BaseException:
    """The error with the client's name of its field: `sent_name` of the parameter."""
    if not isinstance(error, ApiError) or error.param is None:
        return error
    ours = re.split(r"[.\[]", error.param, maxsplit=1)[0]
    name = sent_name(ours)
    if name == ours:
        return error
    message = error.message if ours in PROSE else re.sub(rf"\b{re.escape(ours)}\b", name, error.message)
    return ApiError(error.status, message, name + error.param[len(ours) :], error.code, error.retry_after)


@contextmanager
def sent_as(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the body name the client's fields: `names` maps words of sentences, and
    parameters, to the client's."""
    try:
        yield
    except ApiError as error:
        if error.status != 400:
            raise
        words = "|".join(re.escape(word) for word in sorted(names, key=len, reverse=True))
        message = re.sub(rf"(?<!\w)(?:{words})(?!\w)", lambda match: names[match[0]], error.message)
        param = names.get(error.param, error.param) if error.param else None
        raise ApiError(error.status, message, param, error.code) from None
