"""Detokenizes the output of a step: `StepTokens` in, `StepText` out, for all requests at once.

Keeps one small state per request until the engine reports its end. Used by the client and the
detokenizer process. Must not know sockets or HTTP; `frame.text.incremental_decoder` decodes
one sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from frame.core.ipc.inflight_file import hash_request
from frame.core.messages import Finish, StartDetokenize, StepOutput, StepText, StepTokens, TokenLogprobs
from frame.text.incremental_decoder import FAILED, ByteDecoder, TextStream, WindowDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.text.tokenizer import Tokenizer

# fields that only some requests of a step have, by index
BY_INDEX = tuple(name for name in StepTokens.__struct_fields__ if name not in ("rids", "token_ids"))
SHARED = tuple(name for name in StepOutput.__struct_fields__ if name in BY_INDEX)  # those that its text has too


class Detokenizer:
    """The text streams of all requests."""

    def __init__(self, tokenizer: Tokenizer, early_limit: int = 0, inflight: np.ndarray | None = None) -> None:
        """`early_limit`: number of requests whose tokens are kept until their `StartDetokenize`
        arrives; 0 where it always comes first. `inflight` (uint64 [1]) holds the hash of the
        request being decoded, which attributes a crash of this process to it."""
        self._tokenizer = tokenizer
        self._early_limit = early_limit
        self._inflight = inflight
        self._pieces = tokenizer.pieces
        self._tables: dict[bool, tuple[list[bytes], list[str | None]]] = {}
        self._streams: dict[str, TextStream] = {}
        self._early: dict[str, list[StepTokens]] = {}  # tokens received before their `StartDetokenize`: the sockets share no order

    def __len__(self) -> int:
        return len(self._streams)

    def create_stream(self, params: SamplingParams, prompt_tail: Sequence[int] = ()) -> TextStream:
        """Create a stream for one sequence, which this object does not keep."""
        if self._pieces is None:
            return TextStream(WindowDecoder(self._tokenizer, params.skip_special_tokens, prompt_tail), params)
        pieces, strings = self._table(params.skip_special_tokens)
        return TextStream(ByteDecoder(pieces), params, strings)

    def start_request(self, message: StartDetokenize) -> list[StepText]:
        """Start a request. Returns the text of tokens that were received before."""
        stream = self._streams[message.rid] = self.create_stream(message.params, message.prompt_tail)
        if self._inflight is not None:
            stream.request_hash = hash_request(message.rid)
        if message.token_ids:
            *_, end = self._feed(stream, message.token_ids, None)
            if end is FAILED:
                return [StepText(rids=[message.rid], texts=[""], token_ids=[[]], finishes={0: end}, stopped=[0])]
        return [self.process_step(tokens) for tokens in self._early.pop(message.rid, ())]

    def drop_requests(self, rids: Iterable[str]) -> None:
        """Drop requests that did not reach the engine."""
        for rid in rids:
            self._streams.pop(rid, None)
            self._early.pop(rid, None)

    def reset(self) -> None:
        """Drop all requests, after an engine crash."""
        self._streams.clear()
        self._early.clear()

    def process_step(self, tokens: StepTokens) -> StepText:
        """Return the text of a step. `stopped` lists requests that reached a stop string; later
        tokens of theirs are left out."""
        streams, finishes = self._streams, tokens.finishes
        texts: list[str] = []
        token_ids = tokens.token_ids
        ended: dict[int, Finish] = dict(finishes)
        trimmed: dict[int, int] = {}
        left_out: list[int] = []
        stopped: list[int] = []
        for index, rid in enumerate(tokens.rids):
            ids = token_ids[index]
            stream = streams.get(rid)
            if stream is None or stream.closed:
                self._put_aside(tokens, index, stream)
                left_out.append(index)
                texts.append("")
                continue
            finish = finishes.get(index)
            if finish is None and len(ids) == 1 and stream.search is None and stream.strings is not None:  # the common case
                text = _whole(stream.strings, ids[0]) if not stream.decoder.pending else None  # type: ignore[attr-defined]
                if text is not None:
                    texts.append(text)
                    continue
            text, used, end = self._feed(stream, ids, finish)
            texts.append(text)
            if end is not None:
                ended[index] = end
            if used < len(ids):
                trimmed[index] = used
            if finish is not None:
                del streams[rid]
            elif stream.closed:
                stopped.append(index)
        if trimmed:
            tokens = _trim(tokens, trimmed)
        if left_out:
            return _leave_out(tokens, texts, ended, stopped, left_out)
        shared: dict[str, Any] = {name: getattr(tokens, name) for name in SHARED} | {"finishes": ended}
        return StepText(rids=tokens.rids, texts=texts, token_ids=tokens.token_ids, **shared, stopped=stopped)

    def _feed(self, stream: TextStream, ids: Sequence[int], finish: Finish | None) -> tuple[str, int, Finish | None]:
        if self._inflight is None:
            return stream.feed(ids, finish)
        self._inflight[0] = stream.request_hash
        try:
            return stream.feed(ids, finish)
        finally:
            self._inflight[0] = 0

    def _table(self, skip_special: bool) -> tuple[list[bytes], list[str | None]]:
        table = self._tables.get(skip_special)
        if table is None:
            special = self._tokenizer.special_ids if skip_special else frozenset()
            pieces = [b"" if i in special else piece for i, piece in enumerate(self._pieces or ())]
            table = self._tables[skip_special] = (pieces, [_as_characters(piece) for piece in pieces])
        return table

    def _put_aside(self, tokens: StepTokens, index: int, stream: TextStream | None) -> None:
        rid = tokens.rids[index]
        if stream is None:
            self._keep_early(rid, _only(tokens, index))
        elif index in tokens.finishes:  # the engine has ended the stopped request
            del self._streams[rid]

    def _keep_early(self, rid: str, tokens: StepTokens) -> None:
        if self._early_limit:
            self._early.setdefault(rid, []).append(tokens)
        while len(self._early) > self._early_limit:  # the oldest request will not start any more
            self._early.pop(next(iter(self._early)))


def _whole(strings: Sequence[str | None], token_id: int) -> str | None:
    return strings[token_id] if token_id < len(strings) else ""


def _as_characters(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _only(tokens: StepTokens, index: int) -> StepTokens:
    """The part of the message about one request."""
    fields = {name: {0: values[index]} for name in BY_INDEX if index in (values := getattr(tokens, name))}
    return StepTokens(rids=[tokens.rids[index]], token_ids=[tokens.token_ids[index]], **fields)


def _trim(tokens: StepTokens, counts: dict[int, int]) -> StepTokens:
    """The message without the tokens after a stop string."""
    ids, logprobs = list(tokens.token_ids), dict(tokens.logprobs)
    for index, count in counts.items():
        ids[index] = ids[index][:count]
        if index in logprobs:
            whole = logprobs[index]
            logprobs[index] = TokenLogprobs(whole.token_ids[:count], whole.logprobs[:count], whole.top[:count])
    return msgspec.structs.replace(tokens, token_ids=ids, logprobs=logprobs)


def _leave_out(tokens: StepTokens, texts: list[str], ended: dict[int, Finish], stopped: list[int], left_out: list[int]) -> StepText:
    gone = set(left_out)
    kept = [index for index in range(len(texts)) if index not in gone]
    place = {index: new for new, index in enumerate(kept)}
    entries: dict[str, dict[int, Any]] = {name: getattr(tokens, name) for name in SHARED} | {"finishes": ended}
    by_index: dict[str, Any] = {name: {place[i]: value for i, value in values.items() if i in place} for name, values in entries.items()}
    return StepText(
        rids=[tokens.rids[i] for i in kept],
        texts=[texts[i] for i in kept],
        token_ids=[tokens.token_ids[i] for i in kept],
        **by_index,
        stopped=[place[i] for i in stopped],
    )
