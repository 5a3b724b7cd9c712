"""Incremental decoding: the joined text equals the whole text for every split; stop strings;
crashes."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.inflight_file import hash_request
from frame.core.messages import Finish, StartDetokenize, StepText, StepTokens, TokenLogprobs
from frame.text.detokenizer import BY_INDEX, Detokenizer
from frame.text.incremental_decoder import FAILED, ByteDecoder, TextStream
from frame.text.tokenizer import Tokenizer

LENGTH = Finish("length")


@functools.cache
def byte_level() -> Tokenizer:
    """Every byte, some longer pieces, an added token with a space, special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    for piece in ("Ġthe", "ing", "Ã¼", "ä½", "ðŁ", "ĺĢ"):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("日本")])
    return Tokenizer(backend)


@functools.cache
def byte_fallback() -> Tokenizer:
    """A SentencePiece-like decoder: spaces as ▁, byte fallback, the first space stripped."""
    words = ["▁", "▁Hello", "▁world", "ing", "a", "é", "日"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


@functools.cache
def frame_tiny() -> Tokenizer:
    return Tokenizer.load(Path(find_model("frame-tiny")))


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(bounds)]


def joined(stream: TextStream, pieces: list[list[int]], finish: Finish = LENGTH) -> tuple[str, Finish | None]:
    """The text of the pieces, and how it ended."""
    texts = []
    for i, piece in enumerate(pieces):
        text, _, end = stream.feed(piece, finish if i == len(pieces) - 1 else None)
        texts.append(text)
        if end is not None:
            return "".join(texts), end
    return "".join(texts), None


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "frame_tiny": frame_tiny}
ids_of = st.lists(st.integers(0, 10_000), min_size=1, max_size=40)
cuts = st.lists(st.integers(0, 1000), max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(raw=ids_of, cuts=cuts, skip=st.booleans())
@settings(max_examples=120, deadline=None)
def test_every_split_gives_the_whole_text(name: str, raw: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = [i % tokenizer.vocab_size for i in raw]
    params = SamplingParams(skip_special_tokens=skip)
    text, _ = joined(Detokenizer(tokenizer).create_stream(params), split(ids, cuts))
    one_by_one, _ = joined(Detokenizer(tokenizer).create_stream(params), [[i] for i in ids])
    assert text == one_by_one
    if tokenizer.pieces is not None:
        assert text == tokenizer.decode(ids, skip)


@given(raw=st.lists(st.sampled_from(["Hello", "▁world", "▁", "ing", "a", "é", "日"]), min_size=1, max_size=20))
@settings(max_examples=80, deadline=None)
def test_window_decoder_gives_the_library_s_text(raw: list[str]) -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.find_token_id(word) or tokenizer.find_token_id("▁Hello") or 0 for word in raw]
    assert joined(Detokenizer(tokenizer).create_stream(SamplingParams()), [[i] for i in ids])[0] == tokenizer.decode(ids)


def test_window_decoder_keeps_the_space_after_the_prompt() -> None:
    tokenizer = byte_fallback()
    hello, world = tokenizer.find_token_id("▁Hello"), tokenizer.find_token_id("▁world")
    assert hello is not None
    assert world is not None
    assert joined(Detokenizer(tokenizer).create_stream(SamplingParams(), [hello]), [[world]])[0] == " world"


class Counting(Tokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("piece", ["<0x80>", "</s>"], ids=["invalid byte", "skipped token"])
def test_the_cost_of_a_token_does_not_grow_with_held_back_text(piece: str) -> None:
    tokenizer = Counting(byte_fallback().backend)
    token, a = tokenizer.find_token_id(piece), tokenizer.find_token_id("a")
    assert token is not None
    assert a is not None
    stream = Detokenizer(tokenizer).create_stream(SamplingParams())
    text = "".join(stream.feed([token], None)[0] for _ in range(1000)) + stream.feed([a], LENGTH)[0]
    assert text == tokenizer.decode([token] * 1000 + [a])
    assert tokenizer.decoded < 100 * 1000


def test_incomplete_characters_are_held_back() -> None:
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer).create_stream(SamplingParams())
    ids = [tokenizer.find_token_id(c) for c in "ðŁĺĢ"]
    texts = [stream.feed([i], None)[0] for i in ids if i is not None]
    assert texts == ["", "", "", "😀"]
    assert stream.feed([ids[0] or 0], LENGTH)[0] == "\ufffd"  # the end: nothing more will come


# stop strings
# --------------------------------------------------------------------------------------------------

letters = st.text(alphabet="abc", min_size=1, max_size=30)


@given(text=letters, stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3), cuts=cuts, keep=st.booleans())
@settings(max_examples=200, deadline=None)
def test_stop_strings_cut_at_the_first_match(text: str, stops: list[str], cuts: list[int], keep: bool) -> None:
    tokenizer = byte_level()
    ids = [i for c in text if (i := tokenizer.find_token_id(c)) is not None]
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=keep)
    joined_text, end = joined(Detokenizer(tokenizer).create_stream(params), split(ids, cuts))
    expected, reason = text, LENGTH
    for length in range(1, len(text) + 1):  # the first token that completes a stop string
        hits = [(at, -len(stop), stop) for stop in stops if (at := text[:length].find(stop)) >= 0]
        if hits:
            at, _, stop = min(hits)
            expected, reason = text[: at + len(stop) if keep else at], Finish("stop", stop)
            break
    assert (joined_text, end) == (expected, reason)


def test_the_cost_of_a_token_does_not_grow_with_stop_strings() -> None:
    def seconds(length: int) -> float:
        stops = ("a" * length + "b", "b" + "a" * length, *(chr(99 + i) + "x" * length for i in range(14)))
        stream = TextStream(ByteDecoder([b"a"]), SamplingParams(stop=stops))
        for _ in range(length):
            stream.feed([0], None)
        started = time.process_time()
        for _ in range(1000):
            stream.feed([0], None)
        return time.process_time() - started

    assert min(seconds(1000) for _ in range(5)) < 8 * min(seconds(10) for _ in range(5))


def test_text_is_held_back_only_while_a_stop_string_may_begin_in_it() -> None:
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer).create_stream(SamplingParams(stop=("abcd",)))
    out = [stream.feed([tokenizer.find_token_id(c) or 0], None)[0] for c in "xabcyab"]
    assert out == ["x", "", "", "", "abcy", "", ""]
    assert stream.feed([], LENGTH)[0] == "ab"


def test_min_tokens_delays_stop_strings() -> None:
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer).create_stream(SamplingParams(stop=("a",), min_tokens=3))
    assert joined(stream, [[tokenizer.find_token_id(c) or 0] for c in "aabab"]) == ("aab", Finish("stop", "a"))


def test_the_stop_token_has_no_text_unless_asked() -> None:
    tokenizer = byte_level()
    a, b = tokenizer.find_token_id("a") or 0, tokenizer.find_token_id("b") or 0
    end = Finish("stop", b)
    assert Detokenizer(tokenizer).create_stream(SamplingParams()).feed([a, b], end)[0] == "a"
    assert Detokenizer(tokenizer).create_stream(SamplingParams(include_stop_str_in_output=True)).feed([a, b], end)[0] == "ab"


# many requests
# --------------------------------------------------------------------------------------------------


def watching(*rids: str, **params: object) -> Detokenizer:
    detokenizer = Detokenizer(byte_level())
    for rid in rids:
        assert detokenizer.start_request(StartDetokenize(rid=rid, params=SamplingParams(**params))) == []  # type: ignore[arg-type]
    return detokenizer


def spell(text: str) -> list[int]:
    return [byte_level().find_token_id(c) or 0 for c in text]


def test_state_is_dropped_at_the_end() -> None:
    detokenizer = watching("x", "y", "z")
    detokenizer.process_step(StepTokens(rids=["x", "y"], token_ids=[spell("a"), spell("b")], finishes={1: LENGTH}))
    assert len(detokenizer) == 2
    detokenizer.drop_requests(["z"])
    detokenizer.process_step(StepTokens(rids=["x"], token_ids=[[]], finishes={0: Finish("abort")}))
    assert len(detokenizer) == 0


def test_a_stop_string_is_reported_once_and_later_tokens_are_left_out() -> None:
    detokenizer = watching("x", "y", stop=["b"])
    first = detokenizer.process_step(StepTokens(rids=["x", "y"], token_ids=[spell("ab"), spell("c")], num_cached_tokens={0: 4}))
    assert (first.texts, first.finishes, first.stopped) == (["a", "c"], {0: Finish("stop", "b")}, [0])
    later = detokenizer.process_step(
        StepTokens(rids=["x", "y"], token_ids=[spell("z"), spell("d")], num_cached_tokens={1: 9}, finishes={1: LENGTH})
    )
    assert (later.rids, later.texts, later.finishes, later.num_cached_tokens) == (["y"], ["d"], {0: LENGTH}, {0: 9})
    assert len(detokenizer) == 1  # x stays until the engine heard of it
    assert detokenizer.process_step(StepTokens(rids=["x"], token_ids=[[]], finishes={0: Finish("stop")})).rids == []
    assert len(detokenizer) == 0


def test_tokens_after_a_stop_string_in_one_step_do_not_count() -> None:
    detokenizer = watching("x", stop=["b"])
    text = detokenizer.process_step(StepTokens(rids=["x"], token_ids=[spell("abcd")]))
    assert (text.texts, text.token_ids) == (["a"], [spell("ab")])


def test_tokens_before_their_start_are_kept() -> None:
    """Whatever a step says of a request, its text says as well."""
    logprobs = TokenLogprobs([1], [-0.5], [[]])
    fields: dict[str, Any] = {
        "num_cached_tokens": {1: 3},
        "queue_times": {1: 0.25},
        "logprobs": {1: logprobs},
        "prompt_logprobs": {1: logprobs},
        "cached_tiers": {1: {"host": 2}},
    }
    fields |= {"finishes": {1: LENGTH}, "drafts": {1: (2, 1)}}
    assert {*fields, "pooled"} == set(BY_INDEX)  # a vector has no text
    step = StepTokens(rids=["y", "x"], token_ids=[spell("z"), spell("a")], **fields)
    detokenizer = Detokenizer(byte_level(), early_limit=2)
    assert detokenizer.process_step(step).rids == []
    (late,) = detokenizer.start_request(StartDetokenize(rid="x", params=SamplingParams()))
    known = watching("x").process_step(step)  # of one request whose StartDetokenize came in time
    for text in (late, known):
        assert {name: getattr(text, name) for name in fields} == {name: {0: values[1]} for name, values in fields.items()}


def test_tokens_may_arrive_before_their_start() -> None:
    detokenizer = Detokenizer(byte_level(), early_limit=1)
    assert detokenizer.process_step(StepTokens(rids=["unknown"], token_ids=[spell("z")])).rids == []  # has to make room
    assert detokenizer.process_step(StepTokens(rids=["x"], token_ids=[spell("a")], num_cached_tokens={0: 3})).rids == []
    assert detokenizer.process_step(StepTokens(rids=["x"], token_ids=[spell("b")], finishes={0: LENGTH})).rids == []
    late = detokenizer.start_request(StartDetokenize(rid="x", params=SamplingParams()))
    assert [text.texts for text in late] == [["a"], ["b"]]
    assert late[0].num_cached_tokens == {0: 3}
    assert late[1].finishes == {0: LENGTH}
    assert len(detokenizer) == 0
    assert detokenizer.start_request(StartDetokenize(rid="unknown", params=SamplingParams())) == []


@pytest.mark.parametrize("cut", range(8))
def test_a_recovered_request_continues_its_text(cut: int) -> None:
    ids = [*spell("abä"), *spell("bcab")]  # a character of two tokens, and a stop string that is begun several times
    whole, half = watching("x", stop=["abc"]), watching("x", stop=["abc"])
    expected = whole.process_step(StepTokens(rids=["x"], token_ids=[ids], finishes={0: LENGTH})).texts[0]
    first = half.process_step(StepTokens(rids=["x"], token_ids=[ids[:cut]])).texts[0]
    other = Detokenizer(byte_level())
    assert other.start_request(StartDetokenize(rid="x~2", params=SamplingParams(stop=("abc",)), token_ids=ids[:cut])) == []
    assert first + other.process_step(StepTokens(rids=["x~2"], token_ids=[ids[cut:]], finishes={0: LENGTH})).texts[0] == expected


def test_a_step_keeps_its_order_and_its_extras() -> None:
    detokenizer = watching("x", "y")
    tokens = StepTokens(rids=["y", "x"], token_ids=[spell("b"), spell("a")], num_cached_tokens={1: 2})
    assert detokenizer.process_step(tokens) == StepText(
        rids=["y", "x"], texts=["b", "a"], token_ids=[spell("b"), spell("a")], num_cached_tokens={1: 2}
    )


def test_unknown_ids_have_no_text() -> None:
    detokenizer = watching("x")
    assert detokenizer.process_step(StepTokens(rids=["x"], token_ids=[[10**6]])).texts == [""]


class Broken:
    """A decoder that fails at the third token."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.count = 0
        self.at_work: list[int] = []

    def feed(self, token_id: int) -> str:
        self.count += 1
        if self.count == 3:
            raise self.error
        return "x"

    def flush(self) -> str:
        return ""


class Panic(BaseException):
    """As libraries in Rust raise."""


def breaking(error: BaseException, inflight: np.ndarray | None = None) -> Detokenizer:
    """Of requests with prompt token 7 the third token cannot be made text."""

    class Breaking(Detokenizer):
        def create_stream(self, params: SamplingParams, prompt_tail: Sequence[int] = ()) -> TextStream:
            return TextStream(Broken(error), params) if 7 in prompt_tail else super().create_stream(params, prompt_tail)

    return Breaking(byte_level(), inflight=inflight)


@pytest.mark.parametrize("error", [RuntimeError("no such piece"), Panic("index out of bounds")], ids=["exception", "panic"])
@pytest.mark.parametrize("finish", [None, LENGTH], ids=["running", "ending"])
def test_a_failed_decode_ends_its_request_only(error: BaseException, finish: Finish | None) -> None:
    detokenizer = breaking(error)
    detokenizer.start_request(StartDetokenize(rid="bad", params=SamplingParams(), prompt_tail=[7]))
    detokenizer.start_request(StartDetokenize(rid="good", params=SamplingParams()))
    step = StepTokens(rids=["bad", "good"], token_ids=[[65, 66, 67], [65, 66, 67]], finishes={} if finish is None else {0: finish})
    text = detokenizer.process_step(step)
    assert (text.texts[0], text.finishes) == ("", {0: FAILED})
    assert text.texts[1] == detokenizer.process_step(StepTokens(rids=["good"], token_ids=[[65, 66, 67]])).texts[0] != ""
    assert text.stopped == ([0] if finish is None else [])  # the engine is told, if it does not know
    detokenizer.process_step(StepTokens(rids=["bad"], token_ids=[[]], finishes={0: Finish("stop")}))
    assert len(detokenizer) == 1


def test_a_failed_decode_of_recovered_tokens_ends_its_request() -> None:
    detokenizer = breaking(RuntimeError("no such piece"))
    (text,) = detokenizer.start_request(StartDetokenize(rid="bad", params=SamplingParams(), prompt_tail=[7], token_ids=[65, 66, 67]))
    assert (text.rids, text.finishes, text.stopped) == (["bad"], {0: FAILED}, [0])


def test_the_inflight_file_names_the_request_being_decoded() -> None:
    inflight = np.zeros(1, np.uint64)
    seen: list[int] = []

    class Noting(Broken):
        def feed(self, token_id: int) -> str:
            seen.append(int(inflight[0]))
            return "x"

    detokenizer = Detokenizer(byte_level(), inflight=inflight)
    for rid in ("a", "b"):
        detokenizer.start_request(StartDetokenize(rid=rid, params=SamplingParams()))
        detokenizer._streams[rid].decoder, detokenizer._streams[rid].strings = Noting(ValueError()), None
    detokenizer.process_step(StepTokens(rids=["a", "b"], token_ids=[[65], [66]]))
    detokenizer.start_request(StartDetokenize(rid="c", params=SamplingParams(), token_ids=[65]))
    assert seen == [hash_request("a"), hash_request("b")]
    assert inflight[0] == 0
