"""Prompts, segments and subtitles of Whisper, and `Engine.transcribe` over windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from frame import Engine
from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.speech import Segment, Speech, format_subtitles
from frame.text.tokenizer import Tokenizer
from tests.core.greedy import make_loop
from tests.tiny_whisper import CONTEXT, FIRST, MELS, POSITIONS, STAMPS, load_whisper, make_items, make_whisper

DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_STAMPS = FIRST + 2, FIRST + 3, FIRST + 4, FIRST + 5, FIRST + 7
OLDER = {"lang_to_id": None, "task_to_id": None, "is_multilingual": None}  # checkpoints that name the prompt's tokens instead


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
        speech.choose_language("fr", "transcribe")


@pytest.mark.parametrize(
    ("config", "settings", "options"),
    [
        ({"scale_embedding": True}, {}, {"language": "de", "task": "transcribe"}),
        ({}, {"begin_suppress_tokens": "first"}, {"language": "de", "task": "transcribe"}),
        ({}, {"begin_suppress_tokens": None, "suppress_tokens": None}, {"language": "de", "task": "transcribe"}),
        ({}, {"language": "german", "task": "transcribe"}, {}),
        ({}, {"forced_decoder_ids": [[1, DE], [2, TRANSCRIBE]]}, {}),
        ({}, {**OLDER, "forced_decoder_ids": [[1, DE], [2, TRANSCRIBE], [3, NO_STAMPS]]}, {}),
        ({}, {**OLDER, "forced_decoder_ids": [[1, NO_STAMPS]]}, {}),
    ],
    ids=str,
)
def test_tokens_equal_those_of_generate(config: dict[str, Any], settings: dict[str, Any], options: dict[str, str], tmp_path: Path) -> None:
    """What `generation_config.json` says, as transformers' `generate` reads it."""
    import torch

    folder = make_whisper(tmp_path, **config)
    features = np.random.default_rng(3).standard_normal((MELS, 2 * POSITIONS), np.float32)

    def generate() -> list[int]:
        return load_whisper(folder).generate(torch.from_numpy(features)[None], max_new_tokens=20, **options)[0].tolist()

    file = folder / "generation_config.json"
    if settings.get("begin_suppress_tokens") == "first":  # what would come without
        settings = {"begin_suppress_tokens": [generate()[0], 1]}
    written = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))
    resolved = prepare(FrameConfig.model_validate({"model": {"path": str(folder)}, "execution": {"device": "cpu"}})).resolved
    speech = Speech(resolved, Tokenizer.load(folder))
    language = speech.choose_language(options.get("language"), "transcribe")
    prompt, params = speech.plan_window(language, "transcribe", has_stamps=False)
    params = msgspec.structs.replace(params, max_tokens=20)
    (found,) = make_loop(str(folder), 2 * CONTEXT, "torch_native").generate([prompt], params, make_items(tmp_path, [features]))
    assert found == generate()


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
