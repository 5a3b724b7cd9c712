"""The messages that admit a sequence to an engine: the first time, and again from where it stands. Knows no link and no death."""

from __future__ import annotations

import time

import msgspec

from frame.core.messages import Generate, StartDetokenize
from frame.core.text.incremental_decoder import PROMPT_TAIL
from frame.entrypoints.engine_client.response_state import SequenceState

SHORTEST = 0.001  # seconds that are left of a deadline that is past, so that it is the engine that says so


def generate_of(sequence: SequenceState) -> Generate:
    """What the engine is sent, with what is left of the request's time: it may have waited for an engine, the first one too. Raises
    RuntimeError for a sequence that was never submitted."""
    standing = sequence.standing
    message = standing.message
    if message is None:
        raise RuntimeError(f"{sequence.rid} was never submitted")
    deadline = max(SHORTEST, round(standing.expires - time.monotonic(), 3))
    if not standing.admissions:
        return msgspec.structs.replace(message, deadline=deadline)
    has_prompt_logprobs = sequence.prompt_logprobs is not None
    output = list(standing.output)
    return msgspec.structs.replace(
        message,
        rid=standing.name,
        token_ids=sequence.prompt + output,
        params=msgspec.structs.replace(message.params, prompt_logprobs=None) if has_prompt_logprobs else message.params,
        output_len=len(output),
        deadline=deadline,
    )


def watch_of(sequence: SequenceState, message: Generate) -> StartDetokenize:
    """What the detokenizer is told before the tokens that `message` asks for come."""
    return StartDetokenize(
        rid=message.rid,
        params=message.params,
        prompt_tail=sequence.prompt[-PROMPT_TAIL:],
        token_ids=list(sequence.standing.output),
        trace=message.trace,
    )
