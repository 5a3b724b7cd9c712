"""Audio files become the samples, windows and features that transformers makes, within bounds."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import wave
from types import SimpleNamespace

import numpy as np
import pytest

from frame.entrypoints import audio
from frame.entrypoints.audio import RATE, extract_features, read_audio, split_windows
from frame.entrypoints.engine_client.limits import InvalidRequestError


def tone(rate: int, seconds: float = 25.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)


def as_wave(samples: np.ndarray, rate: int, width: int = 2, channels: int = 1) -> bytes:
    whole = (samples * 2 ** (8 * width - 1)).astype("<i8") + (128 if width == 1 else 0)
    frames = np.repeat(whole[:, None], channels, 1).reshape(-1, 1).view(np.uint8)[:, :width]
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(channels)
        written.setsampwidth(width)
        written.setframerate(rate)
        written.writeframes(frames.tobytes())
    return file.getvalue()


@pytest.mark.parametrize(("rate", "width", "channels"), [(16_000, 1, 1), (8_000, 2, 2), (44_100, 3, 1), (48_000, 4, 2)])
def test_waves_of_any_rate_and_width(rate: int, width: int, channels: int) -> None:
    found = read_audio(as_wave(tone(rate), rate, width, channels))
    assert len(found) == 25 * RATE
    assert np.abs(found - tone(RATE)).max() < (0.01 if width == 1 else 1e-3)


def test_damaged_heads_are_read_or_refused() -> None:
    dice, whole = random.Random(0), as_wave(tone(RATE, 0.02), RATE)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(2):
            damaged[dice.randrange(12, 44)] = dice.randrange(256)
        with contextlib.suppress(InvalidRequestError):
            assert read_audio(bytes(damaged)).dtype == np.float32


@pytest.mark.parametrize("mel_bins", [80, 128])
def test_features_equal_those_of_transformers(mel_bins: int) -> None:
    from transformers import WhisperFeatureExtractor

    samples = np.random.default_rng(0).standard_normal(RATE * 12).astype(np.float32)
    theirs = WhisperFeatureExtractor(feature_size=mel_bins)(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    assert np.abs(extract_features(samples, mel_bins, 3000) - theirs).max() < 2e-5


def test_windows_end_where_it_is_quiet() -> None:
    samples = np.ones(RATE * 25, np.float32)
    samples[RATE * 9 : RATE * 9 + 2000] = 0
    windows = split_windows(samples, 10)
    assert [round(start, 2) for start, _ in windows][:2] == [0, 9.03]
    assert sum(len(part) for _, part in windows) == len(samples)
    assert all(len(part) <= 10 * RATE for _, part in windows)


def test_files_have_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_SECONDS", 1)
    with pytest.raises(InvalidRequestError, match="longer than 1 seconds"):
        read_audio(as_wave(tone(8000, 2), 8000))
    with pytest.raises(InvalidRequestError, match="and may have"):
        read_audio(bytes(audio.MAX_BYTES + 1))


@pytest.mark.parametrize("rate", [1, 400_000])
def test_rates_have_a_range(rate: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"1 channels of {rate} samples a second; send 1 to 32 channels of 4000 to"):
        read_audio(as_wave(np.zeros(9), rate))


def test_other_files_are_read_by_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    class SoundFile:
        samplerate, channels = RATE, 2

        def __init__(self, data: io.BytesIO) -> None:
            if data.read() != b"fLaC":
                raise RuntimeError("unknown format")
            self.left = RATE

        def read(self, count: int, dtype: str, always_2d: bool) -> np.ndarray:
            count, self.left = min(count, self.left), self.left - min(count, self.left)
            return np.full((count, 2), (0.25, 0.75), dtype)

    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(SoundFile=SoundFile))
    assert (read_audio(b"fLaC") == 0.5).all()
    with pytest.raises(InvalidRequestError, match="no audio file that libsndfile reads"):
        read_audio(b"ID3")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InvalidRequestError, match="install soundfile on the server"):
        read_audio(b"fLaC")
