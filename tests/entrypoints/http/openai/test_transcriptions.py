"""OpenAI's own client against a Whisper checkpoint: formats, languages, long files, streams, and
files that are refused."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from frame.entrypoints.audio import extract_features
from tests.entrypoints.published import check_response
from tests.entrypoints.serving import RunningServer
from tests.tiny_whisper import FIRST, MELS, POSITIONS, load_whisper, make_whisper

MODEL = "whisper"
EN, NO_STAMPS, TRANSCRIBE = FIRST + 1, FIRST + 7, FIRST + 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp(MODEL))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(folder, "--device", "cpu", "--served-model-name", MODEL, "--dtype", "float32", fake=False)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def audio(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).audio


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(int(16_000 * seconds)) * 0.1).astype(np.float32)


def as_wave(samples: np.ndarray, rate: int = 16_000) -> tuple[str, bytes]:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes((samples * 32768).clip(-32768, 32767).astype("<i2").tobytes())
    return "speech.wav", file.getvalue()


def test_text_equals_that_of_transformers(folder: Path, server: RunningServer, audio: Any) -> None:
    name, data = as_wave(noise(0.9))
    found = audio.transcriptions.create(model=MODEL, file=(name, data), language="en", extra_body={"cache_salt": "a"})
    reference, tokens = load_whisper(folder), [FIRST, EN, TRANSCRIBE, NO_STAMPS]
    samples = np.frombuffer(data[44:], "<i2").astype(np.float32) / 32768
    features = torch.from_numpy(extract_features(samples, MELS, 2 * POSITIONS))[None]
    with torch.no_grad():
        encoded = reference.model.encoder(features)
        while len(tokens) < 128 and tokens[-1] != 1:
            logits = reference(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
            logits[[10, 11]] -= 100
            logits[[220, 1]] -= torch.inf if len(tokens) == 4 else 0
            tokens.append(int(logits.argmax()))
    from transformers import AutoTokenizer

    texts = [token for token in tokens[4:] if token <= NO_STAMPS]
    assert found.text == AutoTokenizer.from_pretrained(folder).decode(texts, skip_special_tokens=True).strip()
    assert found.usage.output_tokens == len(tokens) - 4
    assert found.usage.input_tokens == 4


def test_a_long_file_has_segments_and_subtitles(audio: Any) -> None:
    file = as_wave(noise(2.3), 16_000)
    found = audio.transcriptions.create(model=MODEL, file=file, response_format="verbose_json", timestamp_granularities=["segment"])
    assert (found.language in {"en", "de"}, found.duration) == (True, 2.3)
    assert found.text == "".join(each.text for each in found.segments).strip()
    starts = [each.start for each in found.segments]
    assert starts == sorted(starts)
    assert max(starts) >= 1.0  # those of the last window count from the beginning of the file
    assert all(each.start <= each.end <= 2.3 and each.avg_logprob < 0 for each in found.segments)
    subtitles = audio.transcriptions.create(model=MODEL, file=file, response_format="srt")
    assert subtitles.count(" --> ") == len(found.segments)
    assert subtitles.startswith("1\n00:00:")


@pytest.mark.slow
def test_words_have_times(audio: Any) -> None:
    file = as_wave(noise(2.3), 16_000)
    fields: dict[str, Any] = {"model": MODEL, "file": file, "language": "en", "response_format": "verbose_json"}
    both = audio.transcriptions.create(**fields, timestamp_granularities=["word", "segment"])
    words = audio.transcriptions.create(**fields, timestamp_granularities=["word"])
    assert both.words == words.words
    assert (both.text, words.segments) == (words.text, None)
    assert "".join(word.word for word in words.words) == "".join(words.text.split())
    starts = [word.start for word in words.words]
    assert starts == sorted(starts)
    assert all(0 <= word.start <= word.end <= 2.3 for word in words.words)
    assert starts[-1] > 1.0  # those of the last window count from the beginning of the file
    assert audio.transcriptions.create(**fields, timestamp_granularities=["segment"]).words is None


WORDS = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}


@pytest.mark.parametrize("fields", [{"response_format": "verbose_json"}, WORDS, {"stream": "true"}, {}])
def test_responses_match_the_published_schemas(server: RunningServer, fields: dict[str, str]) -> None:
    path = "/v1/audio/transcriptions"
    form = {"language": "en", **fields}
    reply = httpx.post(f"{server.url}{path}", data=form, files={"file": as_wave(noise(0.2))}, timeout=60).raise_for_status()
    check_response("POST", path, 200, reply.headers["content-type"], reply.content)


@pytest.mark.slow
def test_a_stream_gives_the_same_text(audio: Any) -> None:
    file = as_wave(noise(1.5, 3), 16_000)
    whole = audio.transcriptions.create(model=MODEL, file=file, language="de", response_format="text", prompt="Guten Tag")
    events = list(audio.transcriptions.create(model=MODEL, file=file, language="de", prompt="Guten Tag", stream=True))
    assert events[-1].type == "transcript.text.done"
    assert len(events) > 5
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text.strip() == whole.strip()


@pytest.mark.slow
def test_a_seed_repeats_a_text(audio: Any) -> None:
    file = as_wave(noise(1.5, 5), 16_000)
    fields = {"model": MODEL, "file": file, "language": "en", "temperature": 1.0}
    one, two = (audio.transcriptions.create(**fields, extra_body={"seed": 7, "cache_salt": salt}) for salt in "ab")
    assert one.text == two.text
    others = {audio.transcriptions.create(**fields, extra_body={"seed": seed}).text for seed in range(2)}
    assert len(others) > 1


@pytest.mark.slow
def test_strategies_of_chunks(audio: Any) -> None:
    fields = {"model": MODEL, "file": as_wave(noise(1.5, 5), 16_000), "language": "en"}
    plain = audio.transcriptions.create(**fields).text
    for strategy in ("auto", {"type": "server_vad"}):
        assert audio.transcriptions.create(**fields, chunking_strategy=strategy).text == plain
    assert audio.transcriptions.create(**fields, extra_body={"chunking_strategy": '{"type": "server_vad"}'}).text == plain


def test_a_translation_is_another_text(audio: Any) -> None:
    file = as_wave(noise(0.5, 4), 16_000)
    one, two = audio.transcriptions.create(model=MODEL, file=file, language="de"), audio.translations.create(model=MODEL, file=file)
    assert one.text != two.text


@pytest.mark.parametrize(
    ("fields", "files", "status", "sentence"),
    [
        ({}, {}, 400, "file is missing"),
        ({}, {"file": b""}, 400, "file is missing or empty"),
        ({}, {"file": b"ID3 no audio"}, 400, "install soundfile|no audio file"),
        ({}, {"file": b"RIFF\xff\xff\xff\xffWAVEfmt "}, 400, "install soundfile|no audio file"),
        ({}, {"file": as_wave(noise(0))[1]}, 400, "has no samples"),
        ({}, {"file": as_wave(noise(1), 100)[1]}, 400, "1 channels of 100 samples a second"),
        ({}, {"file": bytes(26 * 1024 * 1024)}, 413, "file has more than 26214400 bytes"),
        ({"language": "xx"}, {}, 400, "it must be one of de, en"),
        ({"language": "german"}, {}, 400, "language is 'german'; it must be one of de, en"),
        ({"response_format": "xml"}, {}, 400, "response_format"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "phrase"}, {}, 400, "timestamp_granularities"),
        ({"response_format": "srt", "stream": "true"}, {}, 400, "stream needs response_format json or text"),
        ({"temperature": "7"}, {}, 400, "temperature"),
        ({"hotwords": "a"}, {}, 400, "the field 'hotwords' is unknown"),
        ({"seed": "one"}, {}, 400, "seed"),
        ({"seed": str(1 << 63)}, {}, 400, "seed"),
        ({"chunking_strategy": "never"}, {}, 400, "chunking_strategy must be auto, or an object of the type server_vad"),
        ({"chunking_strategy": "{"}, {}, 400, "chunking_strategy is no JSON object"),
        ({"chunking_strategy[type]": "other"}, {}, 400, "chunking_strategy.type must be server_vad"),
        ({"chunking_strategy[threshold]": "0.5"}, {}, 400, "chunking_strategy.threshold cannot be set: long files are cut"),
        ({"chunking_strategy": "auto", "chunking_strategy[type]": "server_vad"}, {}, 400, "chunking_strategy is given twice"),
        ({"chunking_strategy[type]": "server_vad", "chunking_strategy": "auto"}, {}, 400, "chunking_strategy is given twice"),
        ({"model": "other"}, {}, 404, "does not exist"),
    ],
)
def test_forms_that_are_refused(server: RunningServer, fields: dict[str, str], files: dict[str, bytes], status: int, sentence: str) -> None:
    given = files if files or not fields else {"file": as_wave(noise(0.2))[1]}
    reply = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        data={"model": MODEL, **fields},
        files={name: ("a.wav", data) for name, data in given.items()} or {"prompt": (None, b"")},
        timeout=60,
    )
    assert reply.status_code == status
    assert any(part in reply.json()["error"]["message"] for part in sentence.split("|")), reply.text
    assert reply.json()["error"]["param"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]}),
        ("/v1/responses", {"input": "hello"}),
        ("/generate", {"text": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/moderations", {"input": "hello"}),
    ],
)
def test_texts_are_refused_with_the_route_of_audio(path: str, body: dict[str, Any], server: RunningServer) -> None:
    reply = server.post(path, body if path == "/generate" else {"model": MODEL, **body})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"] == "'whisper' only transcribes audio; send a file to /v1/audio/transcriptions or /v1/audio/translations"
    assert (error["param"], error["code"]) == ("model", "wrong_task")
