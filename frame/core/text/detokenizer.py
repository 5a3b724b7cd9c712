"""Token ids to text, step by step: `StepTokens` in, `StepText` out, for all requests at once.

Holds one small state a request, dropped when the engine says that the request ended. Knows no socket and no HTTP; how one answer's text is
made is `frame.core.text.incremental_decoder`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from frame.core.ipc.inflight_file import hash_request
from frame.core.messages import Finish, StartDetokenize, StepText, StepTokens, TokenLogprobs
from frame.core.text.incremental_decoder import FAILED, ByteDecoder, TextStream, WindowDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.text.tokenizer import Tokenizer

# what only some requests of a step have
BY_INDEX = tuple(name for name in StepTokens.__struct_fields__ if name not in ("rids", "token_ids"))


class Detokenizer:
    """All requests' streams. `process` takes a step's tokens of every request at once."""

    def __init__(self, tokenizer: Tokenizer, early_limit: int = 0, inflight: np.ndarray | None = None) -> None:
        """`early_limit`: of how many requests tokens are kept that came before the request's Watch. 0 where nothing can overtake it.
        `inflight` (uint64 [1]) has the mark of the request that is at work: whose decoder it was, if this process ends in it."""
        self._tokenizer = tokenizer
        self._early_limit = early_limit
        self._inflight = inflight
        self._pieces = tokenizer.pieces
        self._tables: dict[bool, tuple[list[bytes], list[str | None]]] = {}
        self._streams: dict[str, TextStream] = {}
        self._early: dict[str, list[StepTokens]] = {}  # tokens that overtook their Watch; two sockets keep no common order

    def __len__(self) -> int:
        return len(self._streams)

    def stream(self, params: SamplingParams, prompt_tail: Sequence[int] = ()) -> TextStream:
        """A stream of its own, for one whole answer."""
        if self._pieces is None:
            return TextStream(WindowDecoder(self._tokenizer, params.skip_special_tokens, prompt_tail), params)
        pieces, strings = self._table(params.skip_special_tokens)
        return TextStream(ByteDecoder(pieces), params, strings)

    def watch(self, message: StartDetokenize) -> list[StepText]:
        """Begin a request; returns the text of tokens that came before."""
        stream = self._streams[message.rid] = self.stream(message.params, message.prompt_tail)
        if self._inflight is not None:
            stream.request_hash = hash_request(message.rid)
        if message.token_ids:
            *_, end = self._feed(stream, message.token_ids, None)
            if end is FAILED:
                return [StepText(rids=[message.rid], texts=[""], token_ids=[[]], finishes={0: end}, stopped=[0])]
        return [self.process(tokens) for tokens in self._early.pop(message.rid, ())]

    def forget(self, rids: Iterable[str]) -> None:
        """Drop requests that never reached the engine."""
        for rid in rids:
            self._streams.pop(rid, None)
            self._early.pop(rid, None)

    def reset(self) -> None:
        """Drop everything (the engine is gone)."""
        self._streams.clear()
        self._early.clear()

    def process(self, tokens: StepTokens) -> StepText:
        """The step's text. Requests that hit a stop string are in `stopped`; what the engine still sends of them is left out."""
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
            if finish is None and len(ids) == 1 and not stream.stops and stream.strings is not None:  # the common case, kept short
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
        return StepText(
            rids=tokens.rids,
            texts=texts,
            token_ids=tokens.token_ids,
            finishes=ended,
            num_cached_tokens=tokens.num_cached_tokens,
            queue_times=tokens.queue_times,
            logprobs=tokens.logprobs,
            prompt_logprobs=tokens.prompt_logprobs,
            stopped=stopped,
        )

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
        elif index in tokens.finishes:  # the engine heard of the stop string
            del self._streams[rid]

    def _keep_early(self, rid: str, tokens: StepTokens) -> None:
        if self._early_limit:
            self._early.setdefault(rid, []).append(tokens)
        while len(self._early) > self._early_limit:  # the oldest is of a request that nobody will ask for any more
            self._early.pop(next(iter(self._early)))


def _whole(strings: Sequence[str | None], token_id: int) -> str | None:
    return strings[token_id] if token_id < len(strings) else ""


def _as_characters(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _only(tokens: StepTokens, index: int) -> StepTokens:
    """The message about one of its requests."""
    parts = {name: {0: values[index]} for name in BY_INDEX if index in (values := getattr(tokens, name))}
    return StepTokens(rids=[tokens.rids[index]], token_ids=[tokens.token_ids[index]], **parts)


def _trim(tokens: StepTokens, counts: dict[int, int]) -> StepTokens:
    """The message without the tokens that came after a stop string."""
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
    return StepText(
        rids=[tokens.rids[i] for i in kept],
        texts=[texts[i] for i in kept],
        token_ids=[tokens.token_ids[i] for i in kept],
        finishes={place[i]: value for i, value in ended.items() if i in place},
        num_cached_tokens={place[i]: value for i, value in tokens.num_cached_tokens.items() if i in place},
        queue_times={place[i]: value for i, value in tokens.queue_times.items() if i in place},
        logprobs={place[i]: value for i, value in tokens.logprobs.items() if i in place},
        prompt_logprobs={place[i]: value for i, value in tokens.prompt_logprobs.items() if i in place},
        stopped=[place[i] for i in stopped],
    )
