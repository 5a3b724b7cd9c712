"""Prompts, segments and subtitles of Whisper, and `Engine.transcribe` over windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from frame import Engine
from frame.core.config.schema import FrameConfig
from frame.core.text.tokenizer import Tokenizer
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.speech import Segment, Speech, format_subtitles
from tests.tiny_whisper import FIRST, STAMPS, make_whisper

DE, TRANSLATE, PREVIOUS, NO_STAMPS = FIRST + 2, FIRST + 3, FIRST + 5, FIRST + 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def speech(folder: Path) -> Speech:
    config = FrameConfig.model_validate({"model": {"path": str(folder)}, "execution": {"device": "cpu"}})
    return Speech(prepare(config).resolved, Tokenizer.load(folder))


def test_the_prompt_names_language_and_task(speech: Speech) -> None:
    ids, params = speech.plan_window("de", "translate", has_stamps=False)
    assert ids == [FIRST, DE, TRANSLATE, NO_STAMPS]
    assert params.logit_bias == {10: -100.0, 11: -100.0}
    ids, params = speech.plan_window("de", "translate", "word " * 200, has_stamps=True, temperature=0.5)
    assert (ids[0], ids[-3:], len(ids)) == (PREVIOUS, [FIRST, DE, TRANSLATE], 1 + 63 + 3)
    assert (params.logit_bias[NO_STAMPS], params.temperature) == (-100.0, 0.5)
    assert speech.plan_detection()[1].logit_bias == {FIRST + 1: 100.0, DE: 100.0}
    with pytest.raises(InvalidRequestError, match="it must be one of de, en"):
        speech.check_request("fr", "transcribe")


def test_segments_lie_between_timestamps(speech: Speech) -> None:
    def stamp(step: int) -> int:
        return NO_STAMPS + 1 + step

    assert STAMPS[25] == "<|0.50|>"
    ids = [stamp(5), 70, 71, stamp(25), stamp(30), 72, 73]
    found = speech.read_segments(ids, 10.0, 0.9, [-1.0, -2.0, None])
    assert [(each.start, each.end, each.token_ids) for each in found] == [(10.1, 10.5, [70, 71]), (10.6, 10.9, [72, 73])]
    assert found[0].avg_logprob == -1.5
    (whole,) = speech.read_segments(ids, 10.0, 0.9, has_stamps=False)
    assert (whole.start, whole.end, whole.token_ids) == (10.0, 10.9, [70, 71, 72, 73])


def test_subtitles() -> None:
    segments = [Segment(0.0, 1.5, " one", []), Segment(3661.25, 3662.0, " two --> three", [])]
    assert format_subtitles(segments, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\none\n\n2\n01:01:01,250 --> 01:01:02,000\ntwo -> three\n"
    )
    assert format_subtitles(segments, "vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none\n")


def test_the_offline_engine_transcribes(folder: Path) -> None:
    samples = (np.random.default_rng(0).standard_normal(40_000) * 0.1).astype(np.float32)
    with Engine(str(folder), device="cpu", threads=1) as engine:
        whole = engine.transcribe(samples, language="en")
        assert (whole.language, whole.duration) == ("en", 2.5)
        assert whole.segments[-1].end == 2.5
        assert engine.transcribe(samples[:8000]).language in {"en", "de"}
        with pytest.raises(InvalidRequestError, match="language is 'xx'"):
            engine.transcribe(samples, language="xx")


def test_other_models_transcribe_nothing() -> None:
    resolved = prepare(FrameConfig.model_validate({"execution": {"device": "cpu"}})).resolved
    with pytest.raises(InvalidRequestError, match="transcribes no audio; serve a Whisper checkpoint"):
        Speech(resolved, None)  # type: ignore[arg-type]
