"""Audio for speech models: files to samples, samples to windows, windows to log-mel features.

WAV files are read by the standard library, others by `soundfile` where it is installed. All work is
bounded by the size of the file and `MAX_SECONDS`. Used by `frame.entrypoints.speech`. Must not know
a model or a request; imports no torch.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from frame.entrypoints.engine_client.limits import InvalidRequestError

RATE = 16_000  # samples a second of all features
MAX_BYTES = 25 * 1024 * 1024  # of a file, as in the OpenAI API
MAX_SECONDS = 1800
HOP = 160  # samples between two frames
_WINDOW = 400  # samples of a frame
_RATES = (4_000, 384_000)
_MAX_CHANNELS = 32
_BLOCK_SECONDS = 10  # of a file that are converted at a time
_EDGE_SECONDS = 0.1  # around a block, against ringing at its ends
_QUIET_SECONDS = 3  # at the end of a window, in which it may be cut
_QUIET_FRAME = RATE // 20

Read = Callable[[int], np.ndarray]  # frames -> float32 [at most so many, channels]


def read_audio(data: bytes) -> np.ndarray:
    """The samples of a file, float32 [n], mono, `RATE` a second. Raises InvalidRequestError for a
    file that cannot be read, is empty or is too long."""
    if len(data) > MAX_BYTES:
        raise InvalidRequestError(f"the file has {len(data)} bytes, and may have {MAX_BYTES}; send a shorter or compressed one", "file")
    opened = _open_wave(data) or _open_other(data)
    read, rate, channels = opened
    if not (_RATES[0] <= rate <= _RATES[1] and 1 <= channels <= _MAX_CHANNELS):
        allowed = f"1 to {_MAX_CHANNELS} channels of {_RATES[0]} to {_RATES[1]}"
        sentence = f"the file has {channels} channels of {rate} samples a second; send {allowed}"
        raise InvalidRequestError(sentence, "file")
    parts = list(_resample(_read_blocks(read, rate), rate))
    if not parts or not sum(map(len, parts)):
        raise InvalidRequestError("the file has no samples; send one with sound", "file")
    return np.concatenate(parts)


def _open_wave(data: bytes) -> tuple[Read, int, int] | None:
    """A WAV file of whole numbers; None for any other file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    try:
        file = wave.open(io.BytesIO(data))  # noqa: SIM115 - in memory
    except (wave.Error, EOFError, RuntimeError):  # floating-point numbers; RuntimeError: a part that is longer than the file
        return None
    width, channels = file.getsampwidth(), file.getnchannels()
    if width not in (1, 2, 3, 4) or not channels:
        return None

    def read(count: int) -> np.ndarray:
        found = np.frombuffer(file.readframes(count), np.uint8)
        found = found[: len(found) // (width * channels) * width * channels].reshape(-1, width)
        if width == 1:
            return ((found[:, 0].astype(np.float32) - 128) / 128).reshape(-1, channels)
        whole = np.zeros((len(found), 4), np.uint8)
        whole[:, 4 - width :] = found
        return (whole.view("<i4")[:, 0].astype(np.float32) / 2**31).reshape(-1, channels)

    return read, file.getframerate(), channels


def _open_other(data: bytes) -> tuple[Read, int, int]:
    try:
        import soundfile
    except ImportError:
        sentence = "the file is no WAV file of whole numbers; convert it, or install soundfile, the extra audio, on the server"
        raise InvalidRequestError(sentence, "file") from None
    try:
        file: Any = soundfile.SoundFile(io.BytesIO(data))
    except (RuntimeError, TypeError):  # of libsndfile; a raw file has no format
        raise InvalidRequestError("the file is no audio file that libsndfile reads; send WAV, FLAC, MP3 or Ogg", "file") from None

    def read(count: int) -> np.ndarray:
        try:
            found: np.ndarray = file.read(count, dtype="float32", always_2d=True)
        except RuntimeError:
            raise InvalidRequestError("the file is damaged; send it again", "file") from None
        return found

    return read, file.samplerate, file.channels


def _read_blocks(read: Read, rate: int) -> Iterator[np.ndarray]:
    """Blocks of mono samples, float32. Raises InvalidRequestError beyond `MAX_SECONDS`."""
    total, size = 0, rate * _BLOCK_SECONDS
    while len(block := read(size)):
        total += len(block)
        if total > rate * MAX_SECONDS:
            raise InvalidRequestError(f"the file is longer than {MAX_SECONDS} seconds; send it in parts", "file")
        yield np.nan_to_num(block.mean(axis=1), posinf=0.0, neginf=0.0)
        if len(block) < size:
            return


def _resample(blocks: Iterator[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """Blocks at `RATE` samples a second, each transformed with an edge of its neighbours."""
    if rate == RATE:
        yield from blocks
        return
    edge = int(rate * _EDGE_SECONDS)
    before, block = np.zeros(0, np.float32), next(blocks, None)
    start = 0  # of the block, in samples of the file
    while block is not None:
        after = next(blocks, None)
        joined = np.concatenate((before, block, np.zeros(0, np.float32) if after is None else after[:edge]))
        first, end = (round(at * RATE / rate) for at in (start, start + len(block)))
        offset = round((start - len(before)) * RATE / rate)
        yield _transform(joined, round(len(joined) * RATE / rate))[first - offset : end - offset]
        start += len(block)
        before, block = block[-edge:], after


def _transform(samples: np.ndarray, count: int) -> np.ndarray:
    spectrum = np.fft.rfft(samples)
    size = count // 2 + 1
    kept = np.zeros(size, spectrum.dtype)
    kept[: min(size, len(spectrum))] = spectrum[:size]
    return (np.fft.irfft(kept, count) * (count / max(1, len(samples)))).astype(np.float32)


def split_windows(samples: np.ndarray, seconds: float) -> list[tuple[float, np.ndarray]]:
    """(start in seconds, samples) of windows of at most `seconds`. A window that is not the last
    one ends where its end is quietest."""
    longest, start, windows = int(seconds * RATE), 0, []
    while start < len(samples):
        end = min(len(samples), start + longest)
        if end < len(samples):
            quiet = max(start + longest // 2, end - _QUIET_SECONDS * RATE)
            frames = samples[quiet : quiet + (end - quiet) // _QUIET_FRAME * _QUIET_FRAME].reshape(-1, _QUIET_FRAME)
            if len(frames):
                end = quiet + (int(np.square(frames).sum(1).argmin()) * 2 + 1) * _QUIET_FRAME // 2
        windows.append((start / RATE, samples[start:end]))
        start = end
    return windows


def extract_features(samples: np.ndarray, mel_bins: int, frames: int) -> np.ndarray:
    """The log-mel features of a window, float32 [mel_bins, frames], padded with silence; those of
    `WhisperFeatureExtractor` in transformers."""
    padded = np.zeros(frames * HOP, np.float32)
    padded[: len(samples)] = samples[: len(padded)]
    padded = np.pad(padded, _WINDOW // 2, mode="reflect")
    view = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[: frames * HOP : HOP]
    power = np.abs(np.fft.rfft(view * np.hanning(_WINDOW + 1)[:-1], axis=1)) ** 2
    found = np.log10(np.maximum(_make_mel_filters(mel_bins) @ power.T, 1e-10))
    return ((np.maximum(found, found.max() - 8) + 4) / 4).astype(np.float32)


@lru_cache(maxsize=2)
def _make_mel_filters(count: int) -> np.ndarray:
    """Triangles on the mel scale of Slaney's Auditory Toolbox, of equal area, [count, bins]."""
    linear, step = 200 / 3, np.log(6.4) / 27  # hertz of a mel up to 1000 Hz, and logarithm of a mel's ratio above
    mels = np.linspace(0, 15 + np.log(RATE / 2 / 1000) / step, count + 2)
    edges = np.where(mels < 15, mels * linear, 1000 * np.exp(step * (mels - 15)))
    bins = np.linspace(0, RATE / 2, _WINDOW // 2 + 1)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    filters: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return filters
