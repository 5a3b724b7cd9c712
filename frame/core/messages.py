"""The messages between processes: a closed union of msgspec structs, sent as MessagePack, never
pickled.

Used by the engine, its client and the text processes. It must not know sockets (see
`frame.core.ipc.transport`) or HTTP. A request is named by its `rid` in all messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from frame.core.interfaces.kv_tier import KVTransfer
from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

# Why a request failed. Front ends choose the status and the parameter name by it; they never parse
# the sentence.
#   queue_full          the request may be sent again later
#   deadline_exceeded   the request took longer than its deadline
#   invalid_request     the field `Finish.param` is invalid
#   invalid_grammar     the grammar is invalid or exceeds its budget; `Finish.param` is its kind
#   non_finite_logits   the model yielded NaN or infinity
# None: an internal error.
ErrorCode = Literal["queue_full", "deadline_exceeded", "invalid_request", "invalid_grammar", "non_finite_logits"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Base of all messages. `trace` fields hold a W3C traceparent; "": the request is not
    traced."""


# to the engine ------------------------------------------------------------------------------------


class SessionPin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The prefix of a request is kept after its end, in place of the session's earlier one."""

    tenant: str
    session: str  # unique within the tenant
    seconds: float
    is_named: bool = True  # False: it ends where a longer prefix is kept for as long


class Generate(Message, frozen=True):
    """Start one sequence; the client splits `n` into several."""

    rid: str
    token_ids: list[int]  # the prompt, and the output so far of a recovered request
    params: SamplingParams
    output_len: int = 0  # how many of `token_ids` are output
    priority: int = 0  # higher first
    namespace: str = ""  # of the prefix cache: requests share prefixes within one namespace only
    deadline: float | None = None  # seconds from arrival; None: the engine's request timeout
    second_text_start: int = 0  # index of the first token of a pair's second text; 0: one text
    adapter: str = ""  # digest of a loaded adapter; "": none
    media: list[MediaItem] = []  # in the order of the prompt
    transfer: KVTransfer | None = None  # of the prompt's blocks, to or from another server
    pin: SessionPin | None = None
    trace: str = ""
    is_further: bool = False  # not the first sequence of its request


class Abort(Message, frozen=True):
    """End these requests; they finish with `reason`. An unknown rid is no error."""

    rids: list[str]
    reason: FinishReason = "abort"


class AbortAll(Message, frozen=True):
    """End every request that the engine has; they finish with `reason`."""

    reason: FinishReason = "abort"


class Control(Message, frozen=True):
    """A command to the engine, which sends one `ControlReply` with the same id once it has taken
    effect on every rank."""

    id: str
    action: Literal[
        "flush_cache", "outline_cache", "outline_requests", "server_info", "pause", "resume", "check_integrity", "start_profile",
        "stop_profile", "shutdown", "ping", "load_adapter", "unload_adapter", "update_weights", "transfer_weights", "sleep", "wake",
        "end_session",
    ]  # fmt: skip
    arguments: dict[str, Any] = {}


# from the engine ----------------------------------------------------------------------------------


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request ended."""

    reason: FinishReason
    matched: int | str | None = None  # the stop token id or stop string
    error: str | None = None  # one sentence for the client, where the reason is "error"
    code: ErrorCode | None = None  # what went wrong; None: an internal error, or no error
    param: str | None = None  # the field of the request that is at fault; of an invalid grammar, its kind


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive tokens, in parallel lists."""

    token_ids: list[int]
    logprobs: list[float | None]  # None: of the first prompt token
    # for each token, (id, log-probability) of the likeliest ones, then of `logprob_token_ids`
    top: list[list[tuple[int, float]]]
    ranks: list[int | None] = []  # of prompt tokens: 1 + the number of likelier tokens


class StepOutput(Message, frozen=True, kw_only=True):
    """What one step yields for all its requests. `rids` and `token_ids` are parallel lists; the
    dicts have entries for some of their indices."""

    rids: list[str]
    token_ids: list[list[int]]  # new tokens of each request: several for a forced run, none at an abort
    finishes: dict[int, Finish] = {}
    num_cached_tokens: dict[int, int] = {}  # prompt tokens found in the prefix cache; sent once
    cached_tiers: dict[int, dict[str, int]] = {}  # of these, tokens that came from tiers, by their names; sent once
    queue_times: dict[int, float] = {}  # seconds from arrival to admission; sent once
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, TokenLogprobs] = {}  # sent once
    drafts: dict[int, tuple[int, int]] = {}  # drafted tokens that were accepted, and those that were rejected
    # float32: the vector of an embedding or classification request, or the hidden states of its
    # tokens, one after another; of one with an aligned text (`AlignedText`), the matrix [tokens,
    # positions]. Sent once
    pooled: dict[int, bytes] = {}


class StepTokens(StepOutput, frozen=True):
    """The tokens of one step."""


class NewWeights(Message, frozen=True):
    """The engine has other weights. Sent by the way of the tokens: those before it are of the
    earlier weights, those after it of `version`."""

    version: str


class ControlReply(Message, frozen=True):
    """The reply to a `Control`."""

    id: str
    ok: bool
    error: str | None = None  # one sentence
    # "conflict": the engine's state or settings forbid the command; "invalid": an argument is wrong
    code: Literal["conflict", "invalid"] | None = None
    data: dict[str, Any] = {}


class Ready(Message, frozen=True):
    """A process has started."""

    process: str
    pid: int
    data: dict[str, Any] = {}  # of the engine: max_total_tokens, page_size, max_context, phases in seconds


class Heartbeat(Message, frozen=True):
    """A sign of life. The engine sends it at a step's start and while idle, with its load; text
    processes send it without. Counters count from the start of the process."""

    process: str
    step: int = 0  # number of the last step
    running: int = 0  # requests
    waiting: int = 0  # requests
    used_pages: int = 0
    total_pages: int = 0
    evictable_pages: int = 0
    groups: list[dict[str, Any]] = []  # of cache groups besides `tokens`: "group" (its name), and the pages as above
    preempted: int = 0  # counter: preemptions
    cached_tokens: int = 0  # counter: prompt tokens found in the prefix cache
    prompt_tokens: int = 0  # counter
    generated_tokens: int = 0  # counter
    device_memory: int = 0  # bytes that the engine's process holds
    jumped_tokens: int = 0  # counter: tokens forced by a grammar that no step sampled
    num_drafts: int = 0  # counter: rows with drafted tokens
    drafted_tokens: int = 0  # counter
    accepted_tokens: int = 0  # counter: drafted tokens that are output
    accepted_at: list[int] = []  # counters: drafts whose token number i, from 0, is output
    drafter_seconds: float = 0.0  # counter: time in the drafter
    adapters_on_device: int = 0  # in their places, with or without requests
    adapters_running: int = 0  # those that a running request uses
    adapter_copies: int = 0  # counter: copies of adapters to the device
    media_rows: int = 0  # of the device's table of encoded media
    media_used_rows: int = 0  # those that hold an item, with or without requests
    media_encoded: int = 0  # counter: items that were encoded
    media_reused: int = 0  # counter: items that were in the table
    media_divided: int = 0  # counter: items that several steps encoded
    tiers: list[dict[str, Any]] = []  # of the KV cache: "tier" (its name), and counters: "loaded_tokens", "stored_tokens"
    tier_waiting: int = 0  # requests that wait for blocks of a tier
    tier_failed_loads: int = 0  # counter: loads that yielded too few blocks
    tier_late_loads: int = 0  # counter: requests that computed because their load had not ended in time
    tier_dropped_blocks: int = 0  # counter: blocks that were not stored because there was no room
    pins: int = 0  # of sessions, those that were evicted included
    pinned_pages: int = 0
    # By layer with experts: tokens of the busiest rank over the mean; empty: not counted yet
    expert_imbalance: list[float] = []


class Fatal(Message, frozen=True):
    """A process ends because of an error."""

    process: str
    error: str  # one sentence for the operator
    trace: str = ""  # the traceback, for the log


# to and from tokenizer and detokenizer processes --------------------------------------------------


class MediaText(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A media item as text: what stands for it in a prompt, and what takes that place."""

    modality: str
    placeholder: str
    row_token: str  # of the expansion; gets a row of the encoder's output
    expansion: str


class Tokenize(Message, frozen=True):
    """Encode one text, one chat or several `inputs`; the reply is `Tokenized`."""

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None  # a chat, with `tools` and `template_arguments`
    tools: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] = {}
    add_special_tokens: bool = True
    inputs: list[list[str]] | None = None  # of one text, or a pair of texts, each
    truncate_to: int | None = None  # tokens to which each input is cut
    max_tokens: int | None = None  # a longer text is refused, before all of it is tokenized
    media: list[MediaText] = []  # of the text or chat, in the order of its parts
    trace: str = ""


class Tokenized(Message, frozen=True):
    """The reply to a `Tokenize`."""

    id: str
    token_ids: list[int] = []  # of the text or chat
    encoded: list[tuple[list[int], int]] = []  # of each input: ids, and the start of the second text
    media_order: list[int] = []  # indices of `Tokenize.media`, in the order of the prompt
    error: str | None = None  # one sentence for the client
    is_too_long: bool = False  # a text has more than `max_tokens` tokens


class StartDetokenize(Message, frozen=True):
    """Announces a request to the detokenizer before its first tokens."""

    rid: str
    params: SamplingParams  # stop strings, and how text is made of special tokens
    prompt_tail: list[int] = []  # the last prompt tokens, for correct spacing
    token_ids: list[int] = []  # output of a recovered request whose text was sent before
    trace: str = ""


class StepText(StepOutput, frozen=True):
    """A `StepTokens` with the text of each request's new tokens."""

    texts: list[str]
    stopped: list[int] = []  # indices that hit a stop string: the client aborts them in the engine


AnyMessage = (
    Generate
    | Abort
    | AbortAll
    | Control
    | StepTokens
    | NewWeights
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
    """Encode a message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Decode a message. Raises msgspec.ValidationError, which names the path of the fault."""
    return _decoder.decode(data)


def as_array(ids: Sequence[int]) -> np.ndarray:
    """The token ids of a message as int32 [len(ids)]. Raises OverflowError for an id that does not
    fit in 32 bits."""
    array = np.empty(len(ids), np.int32)
    try:
        struct.pack_into(f"{len(ids)}i", array.data, 0, *ids)  # takes a third of the time of numpy's conversion of a list
    except struct.error as error:
        raise OverflowError("a token id does not fit in 32 bits") from error
    return array
