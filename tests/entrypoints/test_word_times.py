"""Times of words: the path of dynamic time warping, the words of tokens, and the times of a whole
transcription equal those of transformers, on one rank and on two."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.whisper import generation_whisper, tokenization_whisper

from frame import Engine
from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.audio import extract_features
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.collector import Output
from frame.entrypoints.offline.transcribing import SpeechOptions, transcribe_audio
from frame.entrypoints.speech import Alignment, Speech
from frame.entrypoints.word_times import find_token_ends, split_words
from frame.media.feature_store import FeatureStore
from frame.testing.local_loop import LocalLoop
from frame.text.tokenizer import Tokenizer
from tests.core.greedy import make_loop, on_two_ranks
from tests.tiny_whisper import CONTEXT, FIRST, MELS, POSITIONS, load_whisper, make_whisper

PROMPT = [FIRST, FIRST + 1, FIRST + 4]  # English, transcribe
EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def speech(folder: Path) -> Speech:
    config = FrameConfig.model_validate({"model": {"path": str(folder)}, "execution": {"device": "cpu"}})
    return Speech(prepare(config).resolved, Tokenizer.load(folder))


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (12, 40), (40, 12), (30, 300)])
@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
def test_the_path_equals_that_of_transformers(shape: tuple[int, int], kind: str) -> None:
    matrix = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    matrix = np.round(matrix) if kind == "ties" else np.full(shape, np.nan, np.float32) if kind == "nan" else matrix
    texts, times = generation_whisper._dynamic_time_warping(-matrix.astype(np.float64))
    jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
    assert find_token_ends(matrix).tolist() == times[jumps].tolist()


TEXTS = [
    (' Hello, world! It\'s (well) "so" - 3.5 %', "english"),
    (' ¿Qué? - "Sí", dijo. 😀 é…', "spanish"),
    ("今日は。元気ですか？（はい）", "japanese"),
    ("", "english"),
    (" '", "english"),
]


@pytest.mark.parametrize(("text", "language"), TEXTS)
def test_words_equal_those_of_transformers(folder: Path, text: str, language: str) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(text, False)
    peer: Any = SimpleNamespace(decode=lambda tokens, **_: tokenizer.decode(tokens, False), eos_token_id=10_000, language=None)
    words, _, indices = tokenization_whisper._combine_tokens_into_words(peer, ids, language)
    code = tokenization_whisper.TO_LANGUAGE_CODE[language]
    found = split_words(ids, lambda part: tokenizer.decode(part, False), code)
    assert [(each.text, each.first, each.last) for each in found] == [
        (word, at[0], at[-1]) for word, at in zip(words, indices, strict=True)
    ]


def transcribe_with_transformers(folder: Path, samples: np.ndarray) -> tuple[list[int], list[float]]:
    """A window's tokens after the prompt, and for each its time, as `generate` returns them."""
    features = torch.from_numpy(extract_features(samples, MELS, 2 * POSITIONS))[None]
    mask = torch.zeros(1, 2 * POSITIONS, dtype=torch.int64)
    mask[0, : -(-len(samples) // 160)] = 1
    model = load_whisper(folder)
    model.generation_config.return_timestamps = True
    with torch.no_grad():
        # the rules of timestamps that transformers enforces, and this server does not, are left out
        found = model.generate(
            features, attention_mask=mask, language="en", task="transcribe", return_token_timestamps=True, max_new_tokens=40, num_beams=1,
            return_timestamps=False,
        )  # fmt: skip
    ids, times = found["sequences"][0].tolist(), found["token_timestamps"][0].tolist()
    start = ids.index(FIRST + 7) + 1 if FIRST + 7 in ids else 0  # after <|notimestamps|>
    return ids[start:], times[start:]


@pytest.mark.parametrize("seconds", [0.9, 0.37])
def test_times_equal_those_of_generate(folder: Path, speech: Speech, seconds: float) -> None:
    samples = (np.random.default_rng(3).standard_normal(int(16_000 * seconds)) * 0.1).astype(np.float32)
    ids, times = transcribe_with_transformers(folder, samples)
    assert len(ids) > 10
    prompt = [*PROMPT, FIRST + 7]
    # `generate` has no weights of its last token: it repeats the time of the one before
    read = ids[:-1]
    loop = make_loop(str(folder), 2 * CONTEXT, "torch_native")
    alignment, matrix = align(loop, speech, samples, prompt, read)
    assert alignment.token_ids == read
    assert alignment.shape == (len(read), -(-len(samples) // 160) // 2)
    ends = find_token_ends(matrix) * 0.02
    assert ends.tolist() == pytest.approx(times[:-1], abs=1e-6)
    assert times[-1] == times[-2]
    assert len(set(times)) > 2


def align(loop: LocalLoop, speech: Speech, samples: np.ndarray, prompt: list[int], ids: list[int]) -> tuple[Alignment, np.ndarray]:
    with closing(FeatureStore().open_lease()) as lease:
        (window,) = speech.read_windows(samples, lease)
        alignment = speech.plan_alignment(window, prompt, ids, lease)
        assert alignment is not None
        step, params = speech.plan_alignment_step()
        loop.add_request(step, params, [alignment.item])
        loop.add_request(prompt, params, [window.item])  # a plain request beside it
        found = [matrix for tokens in loop.run_checked() for matrix in tokens.pooled.values()]
        (matrix,) = found
        return alignment, np.frombuffer(matrix, np.float32).reshape(alignment.shape)


def test_ranks_share_the_heads(folder: Path, speech: Speech) -> None:
    samples = (np.random.default_rng(5).standard_normal(14_000) * 0.1).astype(np.float32)
    ids = np.random.default_rng(5).integers(6, 384, 60).tolist()
    one = align(make_loop(str(folder), 4096, "torch_native"), speech, samples, PROMPT, ids)[1]
    case: Any = SimpleNamespace(folder=str(folder))
    two = on_two_ranks(case, lambda loop: align(loop, speech, samples, PROMPT, ids)[1], tokens=4096)
    np.testing.assert_allclose(two, one, atol=2e-4)
    assert (find_token_ends(two) == find_token_ends(one)).all()


@pytest.mark.slow
def test_the_offline_engine_times_words(folder: Path) -> None:
    samples = (np.random.default_rng(0).standard_normal(40_000) * 0.1).astype(np.float32)
    with Engine(str(folder), device="cpu", threads=1, dtype="float32") as engine:
        plain = engine.transcribe(samples, language="en")
        found = engine.transcribe(samples, language="en", word_timestamps=True)
    assert (plain.words, found.text) == ([], plain.text)
    assert "".join(word.text for word in found.words).strip() == found.text
    assert all(0 <= word.start <= word.end <= 2.5 for word in found.words)
    starts = [word.start for word in found.words]
    assert starts == sorted(starts)
    assert starts[-1] > 1.0


@pytest.mark.parametrize(("task", "language"), [("transcribe", "zh"), ("translate", "en")])
def test_words_are_those_of_the_language_of_the_text(task: str, language: str) -> None:
    """A translation from Chinese has spaces between its words."""
    asked: list[str | None] = []
    window: Any = SimpleNamespace(item=None, start=0.0, seconds=1.0)
    speech: Any = SimpleNamespace(
        choose_language=lambda *_: "zh",
        check_alignment=lambda _: None,
        detects_language=True,
        read_windows=lambda *_: [window],
        plan_window=lambda *_, **__: ([1], SamplingParams()),
        plan_alignment=lambda *_: window,
        plan_alignment_step=lambda: ([1], SamplingParams()),
        read_words=lambda _alignment, _matrix, text_language: asked.append(text_language) or [],
        read_segments=lambda *_: [],
    )
    options = SpeechOptions(None, task, "", 0.0, None, word_timestamps=True)
    transcribe_audio(speech, FeatureStore(), lambda *_: [Output()], np.zeros(16_000, np.float32), options)
    assert asked == [language]


@pytest.mark.parametrize("heads", [None, [], [[1, 9]], "all", [[1]]])
def test_a_checkpoint_without_such_heads(heads: Any, tmp_path: Path) -> None:
    folder = make_whisper(tmp_path)
    file = folder / "generation_config.json"
    written = json.loads(file.read_text()) | {"alignment_heads": heads}
    file.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))
    resolved = prepare(FrameConfig.model_validate({"model": {"path": str(folder)}, "execution": {"device": "cpu"}})).resolved
    with pytest.raises(InvalidRequestError, match="has no alignment_heads") as caught:
        Speech(resolved, Tokenizer.load(folder)).check_alignment("timestamp_granularities")
    assert caught.value.param == "timestamp_granularities"
