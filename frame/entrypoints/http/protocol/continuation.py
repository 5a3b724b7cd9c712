"""Streams that move between servers: `StreamRecorder` gives the router the state of a stream beside
its events, and `restore_state` and `replay_output` continue the stream of another server.

A continued request runs the route of its original body. Its sequences are admitted as those of a
crashed engine are, from their last token on; the route's writer gets the earlier output again and
what it writes is dropped, so that parsers, offsets and openings have the state that they had. Used
by `ApiRoute`, `start_request` and `stream_response` of a server with a fleet key. Must not depend
on a dialect.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from frame.config.resolved import Resolved
from frame.core.messages import TokenLogprobs
from frame.entrypoints import handoff as fleet
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.handoff import FleetKey, Handoff, HandoffError, StreamStart, Write
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.paced_json import TURN, Event
from frame.entrypoints.http.request_context import BLOCKS, RequestContext
from frame.entrypoints.version import package_version
from frame.text.detokenizer import Detokenizer
from frame.text.incremental_decoder import PROMPT_TAIL
from frame.text.tokenizer import Tokenizer

# Kinds of plugins that tokens and events depend on
_KINDS = ("model", "weight_format", "attention_backend", "adapter", "modality", "logits_processor", "grammar_backend", "drafter",
          "reasoning_parser", "tool_call_parser")  # fmt: skip
SAMPLED_FILE = 4 << 20  # bytes of a file above which only `SAMPLES` blocks of it are hashed
SAMPLES, SAMPLE = 8, 1 << 14  # blocks, bytes
DIGEST_TURN = 1 << 14  # tokens that are hashed at once, which takes about 0.3 ms
FIRST_WEIGHTS = "default"  # the version before an update
_encode = msgspec.msgpack.encode


class Fleet:
    """What a server needs to give and to take streams. `instance`: this process, which a handoff
    is made for."""

    def __init__(self, key: FleetKey, resolved: Resolved, tokenizer: Tokenizer | None) -> None:
        self.key = key
        self.instance = secrets.token_hex(8)
        self.identity = identify(resolved)
        self.recorders: set[StreamRecorder] = set()  # of the streams that can move
        self.is_draining = False
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.events, self._page_size = _describe_events(resolved), resolved.page_size

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Those of /health."""
        identity = (fleet.FLEET, f"{self.instance} {self.identity} {fleet.VERSION}".encode())
        return (identity, (fleet.KV_EVENTS, self.events)) if self.events else (identity,)

    def asks_for_blocks(self, path: str, value: bytes) -> bool:
        """Whether the router asks for the blocks of the prompt. Another client gets none."""
        try:
            self.key.check(self.key.read(value), path.removesuffix("/"), BLOCKS.decode())
        except HandoffError:
            return False
        return bool(self.events)

    async def tell_blocks(self, state: RequestState) -> bytes:
        """The blocks of the first prompt, where events name them by these hashes: not of media or
        adapters, nor after an update of the weights, which the engine counts in the namespace."""
        from frame.kv_events.prompt_blocks import UNKNOWN, tell_in_turns

        first = state.sequences[0]
        if first.recovery.media or first.recovery.adapter is not None or first.weight_version != FIRST_WEIGHTS:
            return UNKNOWN
        told = b""
        for told in tell_in_turns(first.prompt, state.namespace, self._page_size):
            if not told:
                await asyncio.sleep(0)
        return told

    async def ask_for_moves(self) -> None:
        """Ask the router to move all streams, and those that begin later. It goes on reading those
        that it cannot move."""
        self.is_draining = True
        await asyncio.gather(*(recorder.ask_for_move() for recorder in [*self.recorders]), return_exceptions=True)


def identify(resolved: Resolved) -> str:
    """A digest of all that the tokens and events of a request depend on: release, model, dtypes,
    plugins, templates, and the files of checkpoint, tokenizer and drafter. Large files are compared
    by their sizes and some of their blocks."""
    user = resolved.user
    plugins = [[choice.kind, choice.name, choice.version, choice.options] for kind in _KINDS for choice in resolved.plugins.get(kind, ())]
    text = user.text.model_dump(exclude={"tokenizer_workers", "detokenizer_workers", "chat_template", "score_prompt", "moderation_policy"})
    values = [package_version(), asdict(resolved.model), resolved.dtype, resolved.kv_dtype, resolved.max_context, resolved.task,
              resolved.jump_forward, resolved.sampling_defaults, plugins, text, resolved.served_name, user.model.seed,
              user.speculative.model_dump(exclude={"draft_model_path"})]  # fmt: skip
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=16)
    for place in (resolved.model_path, resolved.tokenizer_path, user.speculative.draft_model_path, user.text.chat_template):
        path = Path(place or "")
        files = [path] if path.is_file() else sorted(path.iterdir()) if place and path.is_dir() else []
        for file in files:
            if file.is_file():
                _hash_file(digest, file)
    return digest.hexdigest()


def _describe_events(resolved: Resolved) -> bytes:
    """Where the router gets KV events; b"": nowhere."""
    cache, plan = resolved.user.cache, resolved.plan
    if cache.events_endpoint is None or cache.events_layout != "map":
        return b""
    from frame.kv_events.publisher import is_bound

    ports = [
        int(endpoint.rpartition(":")[2]) if endpoint is not None and endpoint.startswith("tcp:") and is_bound(endpoint) else 0
        for endpoint in (cache.events_endpoint, cache.events_replay_endpoint)
    ]
    return b"%d %d %d" % (*ports, plan.num_replicas * plan.num_groups) if ports[0] else b""


def _hash_file(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(json.dumps([file.name, size]).encode())
    with file.open("rb") as opened:
        if size <= SAMPLED_FILE:
            digest.update(opened.read())
            return
        for number in range(SAMPLES):
            opened.seek((size - SAMPLE) * number // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE))


async def digest_prompts(state: RequestState) -> bytes:
    """A digest of the prompts' token ids and adapters, computed in turns."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in state.first_sequences:
        use, prompt = sequence.recovery.adapter, sequence.prompt
        digest.update(_encode((len(prompt), use.version.digest if use is not None else "")))
        for start in range(0, len(prompt), DIGEST_TURN):
            digest.update(_encode(prompt[start : start + DIGEST_TURN]))
            if start + DIGEST_TURN < len(prompt):
                await asyncio.sleep(0)
    return digest.digest()


# taking a stream ----------------------------------------------------------------------------------


async def read_fleet_header(context: RequestContext, taker: Fleet | None, value: bytes) -> None:
    """Check the router's header: the response is to be frames, and the body may begin with a
    handoff. Raises ApiError."""
    if taker is None:
        raise ApiError(403, f"{fleet.HEADER.decode()} is for the router of a fleet, and this server has no {fleet.KEY_VARIABLE}")
    path = context.scope["path"].removesuffix("/")
    try:
        signature = taker.key.read(value)
        if not signature.length:
            taker.key.check(signature, path)
        else:
            handoff, body = await _split_body(context, signature.length)
            taker.key.check(signature, path, taker.instance, handoff, body)
            turns = fleet.decode_in_turns(handoff)
            while (decoded := next(turns)) is None:  # noqa: ASYNC110 - its own work
                await asyncio.sleep(0)
            context.handoff = decoded
            if decoded.identity != taker.identity:
                sentence = "the server that began the stream has another checkpoint, tokenizer, release or settings that change tokens"
                raise HandoffError(409, sentence)
    except HandoffError as error:
        raise ApiError(error.status, str(error), code="handoff_refused") from None
    recorder = context.recorder = StreamRecorder(context, taker)
    context.send = recorder.send


async def _split_body(context: RequestContext, length: int) -> tuple[bytes, bytes]:
    """The handoff and the original body; the latter is then the request's. Raises ApiError."""
    maximum = context.max_body
    context.max_body += length
    whole = await context.body()
    if len(whole) < length or len(whole) - length > maximum:
        raise HandoffError(400, "the handoff is cut off, or the body after it is too large")
    handoff, body = whole[:length], whole[length:]
    context.max_body = maximum
    context.scope["headers"] = [pair for pair in context.scope["headers"] if pair[0] != b"content-length"]
    receive, parts = context.receive, [body]

    async def receive_rest() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

    context.receive = receive_rest
    return handoff, body


async def restore_state(state: RequestState, handoff: Handoff, weight_version: Callable[[], str], vocab_size: int) -> None:
    """Give the prepared sequences the output, seeds and counts of the handoff. Raises ApiError 400
    for an output that no sequence can have, 409 where this server has other prompts or weights."""
    start, sequences = handoff.start, state.sequences
    writes = [write for record in handoff.records for write in record]
    if any(not 0 <= write.index < len(sequences) for write in writes) or len(start.seeds) != len(sequences):
        raise ApiError(400, "the handoff has sequences that the request has not", code="handoff_refused")
    for first in range(0, len(writes), fleet.TURN):
        if any(not 0 <= token < vocab_size for write in writes[first : first + fleet.TURN] for token in _list_ids(write)):
            raise ApiError(400, f"the handoff has a token id outside the vocabulary (0 to {vocab_size - 1})", code="handoff_refused")
        await asyncio.sleep(0)
    if start.digest != await digest_prompts(state):
        sentence = "this server has other token ids for the prompt, or another version of the adapter, than the one that began the stream"
        raise ApiError(409, sentence, code="handoff_refused")
    state.created_at, state.fingerprint = start.created, start.fingerprint
    for sequence, seed in zip(sequences, start.seeds, strict=True):
        sequence.params = msgspec.structs.replace(sequence.params, seed=seed)
        sequence.recovery.engine_rid = f"{sequence.rid}~{secrets.token_hex(4)}"  # the stream may have been here before
        sequence.change_version(start.weight_version)
    for number, write in enumerate(writes, 1):
        if number % fleet.TURN == 0:
            await asyncio.sleep(0)
        sequence = sequences[write.index]
        recovery = sequence.recovery
        if write.weight_version:
            sequence.change_version(write.weight_version)
        recovery.output_ids.extend(write.token_ids)
        sequence.cached = recovery.num_cached = write.cached
        recovery.num_accepted, recovery.num_rejected = write.accepted, write.rejected
        sequence.prompt_logprobs = write.prompt_logprobs or sequence.prompt_logprobs
        sequence.finish = write.finish or sequence.finish
        sequence.num_reported = sequence.num_tokens
    state.num_unfinished = sum(sequence.finish is None for sequence in sequences)
    version = next((write.weight_version for write in reversed(writes) if write.weight_version), start.weight_version)
    if version != weight_version():  # last: an update may come between the turns
        sentence = f"this server has the weights {weight_version()!r}, and those that made the stream's last token are {version!r}"
        raise ApiError(409, sentence, code="handoff_refused")


def _list_ids(write: Write) -> Iterator[int]:
    """The token ids of an output and of its log-probabilities."""
    yield from write.token_ids
    for logprobs in (*write.logprobs, *([write.prompt_logprobs] if write.prompt_logprobs else ())):
        yield from logprobs.token_ids
        yield from (token for top in logprobs.top for token, _ in top)


async def replay_output(
    handoff: Handoff, state: RequestState, detokenizer: Detokenizer | None, write: Callable[[SequenceState], Event]
) -> None:
    """Give a route's writer the output that the client has, and drop its events. Output that
    arrives meanwhile stays unread."""
    sequences = state.sequences
    streams = [] if detokenizer is None else [detokenizer.create_stream(s.params, s.prompt[-PROMPT_TAIL:]) for s in sequences]
    until = time.perf_counter() + TURN
    for record in handoff.records:
        for each in record:
            sequence = sequences[each.index]
            text = streams[each.index].feed(each.token_ids, each.finish)[0] if streams else ""
            unread = sequence.texts, sequence.token_ids, sequence.logprobs
            finish = sequence.finish
            sequence.texts, sequence.token_ids, sequence.logprobs = [text], list(each.token_ids), list(each.logprobs)
            sequence.finish = each.finish
            try:
                event = write(sequence)
                if not isinstance(event, bytes):
                    deque(event, maxlen=0)
            finally:
                sequence.texts, sequence.token_ids, sequence.logprobs = unread
                sequence.finish = finish
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + TURN


# giving a stream ----------------------------------------------------------------------------------


class StreamRecorder:
    """Sends a stream as frames. `note` is called before the output of sequences is written; the
    next bytes that are sent are its events. Other responses pass through."""

    def __init__(self, context: RequestContext, giver: Fleet) -> None:
        self._context, self._fleet, self._send = context, giver, context.send
        self._start = b""  # the frame before the first event
        self._record: list[Write] = []  # whose events were not sent yet
        self._versions: dict[int, str] = {}
        self._has_prompt_logprobs: set[int] = set()
        self._is_framed = False

    def note(self, changed: Sequence[SequenceState]) -> None:
        """Record output that is about to be written."""
        for sequence in changed:
            recovery, index, version, prompt_logprobs = sequence.recovery, sequence.index, "", None
            if sequence.weight_version != self._versions.get(index):
                version = self._versions[index] = sequence.weight_version
            if sequence.prompt_logprobs is not None and index not in self._has_prompt_logprobs:
                self._has_prompt_logprobs.add(index)
                prompt_logprobs = sequence.prompt_logprobs
            ids: list[int] = list(sequence.token_ids)
            logprobs: list[TokenLogprobs] = list(sequence.logprobs)
            totals = sequence.cached, recovery.num_accepted, recovery.num_rejected
            self._record.append(Write(index, ids, *totals, version, sequence.finish, logprobs, prompt_logprobs))

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a message of the response."""
        if message["type"] == "http.response.start":
            message = await self._begin(message)
        elif self._is_framed:
            body, record = message.get("body", b""), b""
            is_end = not message.get("more_body", False)
            if self._record:
                record, self._record = _encode(self._record), []
            kind = fleet.END if is_end else fleet.EVENTS if record else fleet.PIECE
            start, self._start = self._start, b""
            message = {**message, "body": start + fleet.frame(kind, record, body)}
            if is_end:
                self._fleet.recorders.discard(self)
        await self._send(message)

    async def _begin(self, message: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        state = self._context.state
        has_length = any(name == b"content-length" for name, _ in message["headers"])
        if message["status"] != 200 or has_length or state is None:
            return message
        self._is_framed = True
        seeds = [sequence.params.seed or 0 for sequence in state.sequences]
        for sequence in state.sequences:
            self._versions[sequence.index] = sequence.weight_version
        version, digest = state.sequences[0].weight_version, await digest_prompts(state)
        start = StreamStart(state.rid, state.created_at, seeds, digest, version, state.fingerprint)
        self._start = fleet.frame(fleet.START, _encode(start)) + (fleet.frame(fleet.DRAINING) if self._fleet.is_draining else b"")
        self._fleet.recorders.add(self)
        return {**message, "headers": [*message["headers"], (fleet.HEADER, b"%d" % fleet.VERSION)]}

    async def ask_for_move(self) -> None:
        """Tell the router that this server drains."""
        if self._is_framed:
            await self._send({"type": "http.response.body", "body": fleet.frame(fleet.DRAINING), "more_body": True})

    def close(self) -> None:
        """The request ends."""
        self._fleet.recorders.discard(self)
