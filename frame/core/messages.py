"""The closed union of values that cross between processes: msgspec structs, MessagePack on the wire, never pickle.

Knows no socket (that is `frame.core.ipc.transport`) and no HTTP. Requests are named by `rid` everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

# What went wrong, for layers that choose a status and a parameter name: sentences are for people, and never parsed.
# queue_full: send the request again later. deadline_exceeded: the request's time is over. invalid_request, invalid_grammar:
# the client's parameter `Finish.param` is at fault. non_finite_logits: the model yielded NaN or infinity. None: an internal error.
ErrorCode = Literal["queue_full", "deadline_exceeded", "invalid_request", "invalid_grammar", "non_finite_logits"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Base of everything on the wire."""


# towards the engine ------------------------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    """One sequence to generate (`n` is spread out by the client). `token_ids` is prompt plus `output_len` tokens generated before
    (a re-admitted request); `namespace` separates prefix caches; `deadline` is in seconds from arrival; `second_text_start` is where a
    pair's
    second text begins (0: there is one text). `trace`, here and below, is a W3C traceparent, or "" where nobody traces."""

    rid: str
    token_ids: list[int]
    params: SamplingParams
    output_len: int = 0
    priority: int = 0
    namespace: str = ""
    deadline: float | None = None
    second_text_start: int = 0
    trace: str = ""


class Abort(Message, frozen=True):
    """End these requests; they finish with `reason`. An unknown rid is no error."""

    rids: list[str]
    reason: FinishReason = "abort"


class AbortAll(Message, frozen=True):
    """End every request that the engine has; they finish with `reason`."""

    reason: FinishReason = "abort"


class Control(Message, frozen=True):
    """A command to the engine, answered by one `ControlReply` of the same id, after it took effect on every rank."""

    id: str
    action: Literal[
        "flush_cache", "outline_cache", "server_info", "pause", "resume", "check_integrity", "start_profile", "stop_profile", "shutdown",
        "ping",
    ]  # fmt: skip
    arguments: dict[str, Any] = {}


# from the engine ---------------------------------------------------------------------------------------------------


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request ended."""

    reason: FinishReason
    matched: int | str | None = None  # the stop token id or stop string
    error: str | None = None  # one sentence for the client, where the reason is "error"
    code: ErrorCode | None = None  # what went wrong; None: an internal error, or no error
    param: str | None = None  # the field of the request that is at fault; of an invalid grammar, its kind


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive tokens; `top` has one list of (id, logprob) a token."""

    token_ids: list[int]
    logprobs: list[float | None]  # the first prompt token has none
    top: list[list[tuple[int, float]]]
    ranks: list[int | None] = []  # of prompt tokens: 1 + how many tokens are likelier


class StepTokens(Message, frozen=True):
    """All tokens of one step, in parallel lists: request i got `token_ids[i]` (a list: speculation yields several).
    The dicts hold entries for some of the indices only. `pooled` has the float32 bytes of a vector for each request of an engine that
    embeds or classifies: its one result, which comes with its finish. `num_cached_tokens` (prompt tokens found in the prefix cache) and
    `queue_times` (seconds from the engine's receiving the request to its admission) come with a request's first tokens."""

    rids: list[str]
    token_ids: list[list[int]]
    finishes: dict[int, Finish] = {}
    num_cached_tokens: dict[int, int] = {}
    queue_times: dict[int, float] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    pooled: dict[int, bytes] = {}


class ControlReply(Message, frozen=True):
    """The answer to a `Control`. `code` is "conflict" where the engine's state or configuration forbids the command."""

    id: str
    ok: bool
    error: str | None = None
    code: Literal["conflict"] | None = None
    data: dict[str, Any] = {}


class Ready(Message, frozen=True):
    """A process finished its start. `data` of the engine: capacity (`max_total_tokens`, `page_size`, `max_context`), phases in seconds."""

    process: str
    pid: int
    data: dict[str, Any] = {}


class Heartbeat(Message, frozen=True):
    """Sent by the engine at a step's start and while idle, where it also carries the load for metrics; and by text processes."""

    process: str
    step: int = 0
    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    total_pages: int = 0
    evictable_pages: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    device_memory: int = 0  # bytes that the engine's process holds of it
    jumped_tokens: int = 0


class Fatal(Message, frozen=True):
    """A process cannot go on; `error` is the sentence for the operator, `trace` for the log."""

    process: str
    error: str
    trace: str = ""


# to and from tokenizer and detokenizer workers ---------------------------------------------------------------------


class Tokenize(Message, frozen=True):
    """Text (or chat, or many `inputs` of one or two texts, each cut to `truncate_to` tokens) to encode; answered by `Tokenized`. Long
    texts of more than `max_tokens` tokens are refused."""

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] = {}
    add_special_tokens: bool = True
    inputs: list[list[str]] | None = None
    truncate_to: int | None = None
    max_tokens: int | None = None
    trace: str = ""


class Tokenized(Message, frozen=True):
    """The answer to a `Tokenize`. `encoded` answers `inputs`: for each its ids, and the index at which the second text begins.
    `is_too_long`: a text has more tokens than `max_tokens`."""

    id: str
    token_ids: list[int] = []
    encoded: list[tuple[list[int], int]] = []
    error: str | None = None
    is_too_long: bool = False


class StartDetokenize(Message, frozen=True):
    """Tells the detokenizer of a request before its first tokens: how its text is made and where it stops. `token_ids` are those whose
    text is out already (a re-admitted request)."""

    rid: str
    params: SamplingParams
    prompt_tail: list[int] = []  # the last prompt tokens, for correct spacing
    token_ids: list[int] = []
    trace: str = ""


class StepText(Message, frozen=True):
    """What the detokenizer makes of a `StepTokens`: the same lists, with text deltas. `stopped` names requests that hit a stop string
    (the client aborts them in the engine)."""

    rids: list[str]
    texts: list[str]
    token_ids: list[list[int]]
    finishes: dict[int, Finish] = {}
    num_cached_tokens: dict[int, int] = {}
    queue_times: dict[int, float] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    stopped: list[int] = []


AnyMessage = (
    Generate
    | Abort
    | AbortAll
    | Control
    | StepTokens
    | ControlReply
    | Ready
    | Heartbeat
    | Fatal
    | Tokenize
    | Tokenized
    | StartDetokenize
    | StepText
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message that `data` holds. Raises msgspec.ValidationError, which names the path of what is wrong."""
    return _decoder.decode(data)
