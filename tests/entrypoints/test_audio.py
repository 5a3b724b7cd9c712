"""Audio files become the samples, windows and features that transformers makes, within bounds."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from frame.entrypoints import audio, audio_process
from frame.entrypoints.audio import extract_features, open_audio, split_windows
from frame.entrypoints.audio_process import AudioProcess, DamagedError, UnreadableError
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.media.sound import RATE, resample


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


def read_audio(data: bytes) -> np.ndarray:
    """All samples of a file."""
    with contextlib.closing(open_audio(data)) as file:
        return np.concatenate(list(audio.read_audio(file)))


@pytest.mark.parametrize(("rate", "width", "channels"), [(16_000, 1, 1), (8_000, 2, 2), (44_100, 3, 1), (48_000, 4, 2)])
def test_waves_of_any_rate_and_width(rate: int, width: int, channels: int) -> None:
    found = read_audio(as_wave(tone(rate), rate, width, channels))
    assert len(found) == 25 * RATE
    assert np.abs(found - tone(RATE)).max() < (0.01 if width == 1 else 1e-3)


def read_damaged_heads() -> int:
    """Read 300 files whose heads are damaged. -> those that were read."""
    dice, whole, read = random.Random(0), as_wave(tone(RATE, 0.02), RATE), 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(2):
            damaged[dice.randrange(12, 44)] = dice.randrange(256)
        with contextlib.suppress(InvalidRequestError):
            assert read_audio(bytes(damaged)).dtype == np.float32
            read += 1
    return read


@pytest.mark.slow
def test_damaged_heads_are_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tenth of the files that are no WAV is given to a process that decodes it."""
    others = itertools.count()

    def open_tenth(data: bytes) -> AudioProcess:
        if next(others) % 10:
            raise UnreadableError
        return AudioProcess(data)

    monkeypatch.setattr(audio, "AudioProcess", open_tenth)
    assert read_damaged_heads() > 20
    assert next(others) > 100


@pytest.mark.soak
def test_all_damaged_heads_are_read_or_refused() -> None:
    assert read_damaged_heads() > 20


@pytest.mark.parametrize("mel_bins", [80, 128])
def test_features_equal_those_of_transformers(mel_bins: int) -> None:
    from transformers import WhisperFeatureExtractor

    samples = np.random.default_rng(0).standard_normal(RATE * 12).astype(np.float32)
    theirs = WhisperFeatureExtractor(feature_size=mel_bins)(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    assert np.abs(extract_features(samples, mel_bins, 3000) - theirs).max() < 2e-5


def test_windows_end_where_it_is_quiet() -> None:
    samples = np.ones(RATE * 25, np.float32)
    samples[RATE * 9 : RATE * 9 + 2000] = 0
    windows = list(split_windows(np.array_split(samples, 7), 10))
    for (start, part), (other_start, other) in zip(windows, split_windows((samples,), 10), strict=True):
        assert start == other_start and (part == other).all()
    assert [round(start, 2) for start, _ in windows][:2] == [0, 9.03]
    assert sum(len(part) for _, part in windows) == len(samples)
    assert all(len(part) <= 10 * RATE for _, part in windows)


def test_files_have_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_SECONDS", 1)
    with pytest.raises(InvalidRequestError, match="longer than 1 seconds"):
        read_audio(as_wave(tone(8000, 2), 8000))
    with pytest.raises(InvalidRequestError, match="and may have"):
        read_audio(bytes(audio.MAX_BYTES + 1))


def test_the_length_is_checked_before_a_file_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wave.Wave_read, "readframes", lambda *_: pytest.fail("the file was decoded"))
    with pytest.raises(InvalidRequestError, match="longer than 1800 seconds"):
        open_audio(as_wave(np.zeros(4000 * 1801), 4000, 1))


def test_heads_that_say_too_much_are_read() -> None:
    """A program that writes to a pipe does not know the length."""
    data = bytearray(as_wave(tone(RATE, 1), RATE))
    data[40:44] = b"\xff\xff\xff\xff"
    with contextlib.suppress(InvalidRequestError):
        assert len(read_audio(bytes(data))) == RATE


def test_channels_and_rate_are_limited_together() -> None:
    with pytest.raises(InvalidRequestError, match="9 channels of 48000 samples a second; send at most 384000"):
        open_audio(as_wave(np.zeros(9), 48_000, 2, 9))


@pytest.mark.parametrize("rate", [1, 400_000])
def test_rates_have_a_range(rate: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"1 channels of {rate} samples a second; send 1 to 32 channels of 4000 to"):
        read_audio(as_wave(np.zeros(9), rate))


FAKE = """
import os, resource, sys, time

class SoundFile:
    samplerate, channels, format = 16000, 2, "FLAC"

    def __init__(self, handle, closefd):
        self.kind = os.read(handle, 100).decode()
        os.write(2, b"[src/libmpg123] error: dequantization failed!")
        if self.kind == "unknown":
            raise RuntimeError("unknown format")
        self.frames = {"long": 16000 * 1801, "liar": 1}.get(self.kind, 16000)
        self.left = 16000 * 4000 if self.kind == "liar" else 16000

    def buffer_read(self, count, dtype):
        count, self.left = min(count, self.left), self.left - min(count, self.left)
        if self.kind == "memory":
            self.kept = bytearray(1 << 30)
        if self.kind == "crash":
            os.kill(os.getpid(), 11)
        if self.kind == "damaged":
            raise RuntimeError("lost sync")
        if self.kind == "hang":
            while True:
                pass
        assert self.kind != "long"
        return b"\\0\\0\\x80\\x3e\\0\\0\\x40\\x3f" * count
"""


@pytest.fixture
def soundfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "soundfile.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join((str(tmp_path), str(Path(audio.__file__).parents[2]))))


@pytest.mark.usefixtures("soundfile")
def test_other_files_are_read_by_soundfile(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert (read_audio(b"well") == 0.5).all() and len(read_audio(b"well")) == RATE
    with pytest.raises(InvalidRequestError, match="no audio file that libsndfile reads"):
        read_audio(b"unknown")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match="install soundfile on the server"):
        read_audio(b"fLaC")


@pytest.mark.usefixtures("soundfile")
@pytest.mark.parametrize("kind", ["damaged", "crash", "memory", "hang"])
def test_a_decoder_at_fault_ends_its_file_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "memory" and not sys.platform.startswith("linux"):
        pytest.skip("memory is limited on Linux only")
    monkeypatch.setattr(audio_process, "TIMEOUT", 1.0 if kind == "hang" else 60.0)
    with pytest.raises(InvalidRequestError, match="is damaged, or takes too much memory or time"):
        read_audio(kind.encode())


@pytest.mark.usefixtures("soundfile")
def test_the_length_of_other_files_is_checked_first_and_last() -> None:
    with pytest.raises(InvalidRequestError, match="longer than 1800 seconds"):
        open_audio(b"long")
    file = open_audio(b"liar")
    size = 0
    with contextlib.closing(file), pytest.raises(InvalidRequestError, match="longer than 1800 seconds"):
        for block in audio.read_audio(file):
            size += len(block)
    assert size <= 1800 * RATE


@pytest.mark.usefixtures("soundfile")
def test_a_closed_file_ends_its_process() -> None:
    with AudioProcess(b"liar") as process:
        assert len(process.read(10)) == 80
        child = process._process
    assert child.poll() == -9
    file = AudioProcess(b"liar")
    file.close()
    with pytest.raises((DamagedError, ValueError)):
        file.read(10)


def test_the_process_imports_little() -> None:
    code = "import sys, frame.entrypoints.audio_process; print([name for name in ('numpy', 'torch', 'msgspec') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("kind", ["MP3", "FLAC", "OGG"])
def test_compressed_files_are_decoded(kind: str) -> None:
    written = pytest.importorskip("soundfile")
    tone = 0.5 * np.sin(np.arange(RATE) * (2 * np.pi * 440 / RATE)).astype(np.float32)
    file = io.BytesIO()
    written.write(file, tone, RATE, format=kind)
    samples = read_audio(file.getvalue())
    assert abs(len(samples) - RATE) < RATE // 10
    loudest = np.abs(np.fft.rfft(samples[: RATE // 2])).argmax() * 2  # of bins of 2 Hz
    assert loudest == 440


@pytest.mark.parametrize("rate", [44_056, 47_952, 22_255, 11_127, 44_100])
def test_a_sound_keeps_its_length_at_any_rate(rate: int) -> None:
    """Also where a tenth of a second is no whole number of samples at `RATE`, and in a last block
    of a few samples."""
    for more in range(1, 400, 7):
        total = 10 * rate + more
        blocks = [np.zeros(10 * rate, np.float32), np.zeros(more, np.float32)]
        assert sum(map(len, resample(iter(blocks), rate))) == round(total * RATE / rate), total


def test_a_sound_of_less_than_half_a_sample_has_none() -> None:
    for rate, count in ((44_100, 1), (48_000, 1), (96_000, 2)):
        assert not sum(map(len, resample(iter([np.zeros(count, np.float32)]), rate)))
