"""Failures of requests, of their preparation and of their sequences, as the `ApiError` that a
client receives. Must not depend on a route."""

from __future__ import annotations

from collections.abc import Sequence

from frame.core.messages import Finish
from frame.core.text.chat_template import ChatTemplateError
from frame.entrypoints.engine_client.limits import ContextLengthError, EngineDeadError, InvalidRequestError
from frame.entrypoints.engine_client.quotas import QuotaExceededError
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.http.errors import CONTEXT_LENGTH, RETRY_AFTER, ApiError, public


def raise_failed(sequences: Sequence[SequenceState]) -> None:
    """Raise ApiError for the first sequence that ended with an error."""
    for sequence in sequences:
        if sequence.finish is not None and sequence.finish.reason == "error":
            raise failure(sequence.finish)


def failure(finish: Finish) -> ApiError:
    """The error of a sequence, with the status that its code stands for."""
    sentence = finish.error or "the request failed"
    if finish.code == "queue_full":
        return ApiError(503, sentence, code="queue_full", retry_after=RETRY_AFTER)
    if finish.code == "deadline_exceeded":
        return ApiError(504, sentence, code="deadline_exceeded")
    if finish.code == "invalid_grammar":
        return ApiError(400, public(sentence), finish.param if finish.param in ("regex", "ebnf", "choice") else "response_format")
    if finish.code == "invalid_request":
        return ApiError(400, public(sentence), finish.param)
    return ApiError(500, sentence)


def too_many(error: QuotaExceededError) -> ApiError:
    """The refusal of a request whose key has all that it may."""
    if error.is_permanent:
        return ApiError(400, str(error), "n")
    return ApiError(429, str(error), code="too_many_requests_of_key", retry_after=RETRY_AFTER)


def as_api_error(error: BaseException) -> BaseException:
    """The `ApiError` of an exception that stopped a request before it ran; other exceptions are
    returned unchanged."""
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), error.param, CONTEXT_LENGTH if isinstance(error, ContextLengthError) else None)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, public(str(error)), "messages")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), retry_after=RETRY_AFTER)
    return error
