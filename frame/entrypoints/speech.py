"""`Speech`: how Whisper is asked to transcribe, and what its tokens say.

Prompts with the language and the task, suppressed tokens, segments by timestamp tokens, subtitles.
Used by the offline engine and the HTTP routes, which run the sequences. Must not know either.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs

from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.audio import HOP, RATE, AudioFile, extract_features, read_audio, split_windows
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.word_times import Word, find_token_ends, split_words
from frame.media.files import map_features

if TYPE_CHECKING:
    from frame.config.resolved import Resolved
    from frame.media.feature_store import FeatureLease
    from frame.text.tokenizer import Tokenizer

STAMP_SECONDS = 0.02  # between two timestamp tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the text. `start` and `end`: seconds from the beginning of the audio."""

    start: float
    end: float
    text: str
    token_ids: list[int] = field(repr=False)
    avg_logprob: float | None = None  # of its window; None: no log-probabilities were asked for

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text for each byte of it compressed; above 2.4 it repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


@dataclass(frozen=True, slots=True)
class Transcription:
    """The text of an audio file. `language`: its code, such as "en"; None for models of one
    language. `duration`: seconds. `segments`: by the model's timestamps, or one a window."""

    text: str
    language: str | None
    duration: float
    segments: list[Segment] = field(repr=False)
    words: list[Word] = field(default_factory=list, repr=False)  # where they were asked for


class Window(NamedTuple):
    """A window of a file. `start` and `seconds`: in the file. `item`: of `Generate`."""

    start: float
    seconds: float
    item: MediaItem


class Alignment(NamedTuple):
    """A window's text that is aligned with its audio. `shape`: of the matrix, (tokens, positions).
    `item`: of `Generate`, with the audio and the text. `start`: seconds, of the window."""

    token_ids: list[int]
    shape: tuple[int, int]
    item: MediaItem
    start: float


class Speech:
    """Raises InvalidRequestError for a model or checkpoint that cannot transcribe."""

    def __init__(self, resolved: Resolved, tokenizer: Tokenizer) -> None:
        if not resolved.model.encoder_length:
            raise InvalidRequestError(f"the model {resolved.served_name} transcribes no audio; serve a Whisper checkpoint", "model")
        self.input_shape = resolved.model.encoder_input
        self.window_seconds = self.input_shape[1] * HOP / RATE
        self._tokenizer = tokenizer
        self._context = resolved.max_context
        self._start = int(resolved.model.config["decoder_start_token_id"])
        file, config = Path(resolved.model_path) / "generation_config.json", resolved.model.config
        settings: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else config
        self._languages = {name.strip("<|>"): int(token) for name, token in (settings.get("lang_to_id") or {}).items()}
        self._tasks: dict[str, int] = settings.get("task_to_id") or {}
        no_stamps = settings.get("no_timestamps_token_id") or tokenizer.find_token_id("<|notimestamps|>")
        if no_stamps is None:
            raise InvalidRequestError("the checkpoint's generation_config.json has no no_timestamps_token_id; add it", "model")
        self._no_stamps = int(no_stamps)
        self._previous = settings.get("prev_sot_token_id") or tokenizer.find_token_id("<|startofprev|>")
        self._suppressed = {int(token): -100.0 for token in settings.get("suppress_tokens") or ()}
        self._suppressed_first = [int(token) for token in settings.get("begin_suppress_tokens") or ()]
        forced = settings.get("forced_decoder_ids") or config.get("forced_decoder_ids") or ()  # of older checkpoints
        self._forced = [int(token) for _, token in forced if token is not None and token != self._no_stamps]
        self._default_language = self._find_default(settings)
        self._has_alignment = bool(resolved.model.config.get("alignment_heads"))
        self._max_aligned = int(resolved.model.config["max_target_positions"])

    def read_windows(self, audio: AudioFile | np.ndarray, lease: FeatureLease) -> Iterator[Window]:
        """The windows of a file, or of float32 samples [n] of 16 kHz, one at a time. lease: what
        keeps their features. Raises InvalidRequestError."""
        blocks = read_audio(audio) if isinstance(audio, AudioFile) else (audio,)
        for start, samples in split_windows(blocks, self.window_seconds):
            features = extract_features(samples, *self.input_shape)
            digest = hashlib.sha256(features.data).digest()
            file = lease.add(digest, {"input_features": features})
            item = MediaItem("audio", digest, [], self.input_shape[1] // 2, file.path, file.arrays)
            yield Window(start, len(samples) / RATE, item)

    def _find_default(self, settings: Mapping[str, Any]) -> str | None:
        """The language that the checkpoint names: its code, its name or its token."""
        named = str(settings.get("language") or "").lower().strip("<|>")
        if named in self._languages:
            return named
        if named:
            from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

            return TO_LANGUAGE_CODE.get(named)
        return next((name for name, language in self._languages.items() if language in self._forced), None)

    def choose_language(self, language: str | None, task: str) -> str | None:
        """The requested language, else that of the checkpoint; None: it has to be detected. Raises
        InvalidRequestError for a language or a task that the model does not have."""
        if language is not None and self._languages and language not in self._languages:
            raise InvalidRequestError(f"language is {language[:20]!r}; it must be one of {', '.join(sorted(self._languages))}", "language")
        if task == "translate" and task not in self._tasks:
            raise InvalidRequestError("the model translates nothing, because it has one language; use /v1/audio/transcriptions", "model")
        return language or self._default_language

    def check_alignment(self, param: str) -> None:
        """Raise InvalidRequestError, which names the field `param`, for a checkpoint that cannot
        say when a word is spoken."""
        if not self._has_alignment:
            sentence = "the checkpoint's generation_config.json has no alignment_heads of its decoder, which times of words need"
            raise InvalidRequestError(f"{sentence}; ask for segments, or add them", param)

    def plan_alignment(self, window: Window, prompt: Sequence[int], ids: Sequence[int], lease: FeatureLease) -> Alignment | None:
        """How a window's text is aligned with its audio: the model reads all of it at once. prompt,
        ids: tokens that the window's text was made with, and its own. None: it has no text."""
        text = [token for token in ids if token not in self._tokenizer.eos_token_ids][: self._max_aligned - len(prompt)]
        if not any(token < self._no_stamps for token in text):
            return None
        positions = max(1, min(self.input_shape[1], math.ceil(round(window.seconds * RATE) / HOP)) // 2)
        arrays = {
            **map_features(window.item),
            "aligned_ids": np.array([*prompt, *text], np.int64),
            "aligned_sizes": np.array([len(prompt), positions], np.int64),
        }
        digest = hashlib.sha256(window.item.digest + arrays["aligned_ids"].tobytes() + arrays["aligned_sizes"].tobytes()).digest()
        file = lease.add(digest, arrays)
        item = structs.replace(window.item, digest=digest, path=file.path, arrays=file.arrays)
        return Alignment(text, (len(text), positions), item, window.start)

    def plan_alignment_step(self) -> tuple[list[int], SamplingParams]:
        """The prompt and parameters of a request with an `Alignment`, whose one token is not read.
        The prompt has one token, so that one step reads it."""
        return [self._start], SamplingParams(max_tokens=1, temperature=0.0)

    def read_words(self, alignment: Alignment, matrix: bytes, language: str | None) -> list[Word]:
        """The words of a window's text, by the matrix that the engine returned. A word lies within
        one segment."""
        ends = find_token_ends(np.frombuffer(matrix, np.float32).reshape(alignment.shape)) * STAMP_SECONDS
        times = np.round(np.append(0.0, ends) + alignment.start, 2).tolist()  # a token starts where the one before it ends
        words, run = list[Word](), list[int]()  # run: indices of the text tokens of a segment

        def end_segment() -> None:
            tokens = [alignment.token_ids[index] for index in run]
            for text, first, last in split_words(tokens, lambda part: self._tokenizer.decode(part, False), language):
                if text.strip():
                    words.append(Word(text, times[run[first]], times[run[last] + 1]))
            run.clear()

        for index, token in enumerate(alignment.token_ids):
            if token > self._no_stamps:
                end_segment()
            elif token not in self._tokenizer.special_ids:
                run.append(index)
        end_segment()
        return words

    @property
    def detects_language(self) -> bool:
        return bool(self._languages)

    def plan_detection(self) -> tuple[list[int], SamplingParams]:
        """The prompt and parameters whose one token is the language of a window."""
        biases = dict.fromkeys(self._languages.values(), 100.0)
        return [self._start], SamplingParams(max_tokens=1, temperature=0.0, logit_bias=biases, skip_special_tokens=False)

    def find_language(self, token: int) -> str | None:
        return next((name for name, each in self._languages.items() if each == token), None)

    def plan_window(
        self, language: str | None, task: str, prompt: str = "", *, has_stamps: bool, temperature: float = 0.0, seed: int | None = None
    ) -> tuple[list[int], SamplingParams]:
        """The prompt and parameters of a window's text."""
        ids = [self._start]
        if self._languages and language is not None:
            ids += [self._languages[language], self._tasks[task]]
        elif not self._languages:
            ids += self._forced
        ids += [] if has_stamps else [self._no_stamps]
        banned = tuple((*ids, token) for token in self._suppressed_first)
        if prompt and self._previous is not None:  # as in openai/whisper, at most half of the context
            ids = [self._previous, *self._tokenizer.encode(f" {prompt.strip()}", False)[-(self._context // 2 - 1) :], *ids]
        bias = dict(self._suppressed)
        if has_stamps:
            bias[self._no_stamps] = -100.0
        return ids, SamplingParams(temperature=temperature, seed=seed, logit_bias=bias, bad_words_ids=banned, logprobs=0)

    def read_segments(
        self, ids: Sequence[int], start: float, seconds: float, logprobs: Sequence[float | None] = (), *, has_stamps: bool = True
    ) -> list[Segment]:
        """The segments of a window that starts at `start` and has `seconds`. Text without a
        timestamp reaches to the window's end."""
        segments: list[Segment] = []
        known = [each for each in logprobs if each is not None]
        average = sum(known) / len(known) if known else None
        begin, tokens = 0.0, list[int]()

        def end_segment(end: float) -> None:
            text = self._tokenizer.decode(tokens)
            if text.strip():
                segments.append(Segment(start + begin, start + max(begin, end), text, list(tokens), average))
            tokens.clear()

        for token in ids:
            if token <= self._no_stamps:
                tokens.append(token)
            if token <= self._no_stamps or not has_stamps:
                continue
            at = min(seconds, (token - self._no_stamps - 1) * STAMP_SECONDS)
            end_segment(at)
            begin = at
        end_segment(seconds)
        return segments


def name_text_language(language: str | None, task: str) -> str | None:
    """The language of the text of audio in `language`: translations are English."""
    return "en" if task == "translate" else language


def join_segments(segments: Sequence[Segment], language: str | None, duration: float, words: Iterable[Word] = ()) -> Transcription:
    """The transcription of all windows' segments."""
    return Transcription("".join(segment.text for segment in segments).strip(), language, duration, list(segments), list(words))


def format_subtitles(segments: Sequence[Segment], kind: str) -> str:
    """The segments as SubRip ("srt") or WebVTT ("vtt")."""
    mark = "," if kind == "srt" else "."
    blocks = []
    for number, each in enumerate(segments, 1):
        times = f"{_format_time(each.start, mark)} --> {_format_time(each.end, mark)}"
        text = each.text.strip().replace("-->", "->")
        blocks.append(f"{number}\n{times}\n{text}\n" if kind == "srt" else f"{times}\n{text}\n")
    return "\n".join(blocks) if kind == "srt" else "WEBVTT\n\n" + "\n".join(blocks)


def _format_time(seconds: float, mark: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{mark}{whole % 1000:03}"
