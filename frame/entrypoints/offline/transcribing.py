"""Transcribes an audio file by the offline engine: its language, its windows, its words.

Used by the engine. Must not import the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.audio import open_audio
from frame.entrypoints.offline.collector import Output
from frame.entrypoints.speech import Speech, Transcription, join_segments, name_text_language

if TYPE_CHECKING:
    from frame.entrypoints.word_times import Word
    from frame.media.feature_store import FeatureStore

Run = Callable[[Sequence[tuple[list[int], SamplingParams]], Sequence[MediaItem]], list[Output]]  # one sequence an item


class SpeechOptions(NamedTuple):
    """See `Engine.transcribe`."""

    language: str | None
    task: str
    prompt: str
    temperature: float
    seed: int | None
    word_timestamps: bool


def transcribe_audio(
    speech: Speech, features: FeatureStore, run: Run, audio: str | Path | bytes | np.ndarray, options: SpeechOptions
) -> Transcription:
    """Raises InvalidRequestError, and what `run` raises."""
    language = speech.choose_language(options.language, options.task)
    if options.word_timestamps:
        speech.check_alignment("word_timestamps")
    data = Path(audio).read_bytes() if isinstance(audio, str | Path) else audio
    audio_file = closing(open_audio(data)) if isinstance(data, bytes) else nullcontext(data)
    with audio_file as opened, closing(features.open_lease()) as lease:
        windows = list(speech.read_windows(opened, lease))
        items = [window.item for window in windows]
        if language is None and speech.detects_language:
            (detection,) = run([speech.plan_detection()], items[:1])
            language = speech.find_language(detection.token_ids[0])
        prompt, temperature, seed = options.prompt, options.temperature, options.seed
        plan = speech.plan_window(language, options.task, prompt, has_stamps=True, temperature=temperature, seed=seed)
        outputs = run([plan] * len(windows), items)
        words: list[Word] = []
        for window, output in zip(windows, outputs, strict=True) if options.word_timestamps else ():
            if (alignment := speech.plan_alignment(window, plan[0], output.token_ids, lease)) is not None:
                (aligned,) = run([speech.plan_alignment_step()], [alignment.item])
                words += speech.read_words(alignment, aligned.vector or b"", name_text_language(language, options.task))
    segments = []
    for window, output in zip(windows, outputs, strict=True):
        logprobs = output.logprobs.logprobs if output.logprobs is not None else ()
        segments += speech.read_segments(output.token_ids, window.start, window.seconds, logprobs)
    return join_segments(segments, language, sum(window.seconds for window in windows), words)
