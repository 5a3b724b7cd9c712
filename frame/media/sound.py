"""Sound as numbers: WAV files of whole numbers, and blocks of samples at `RATE`.

Used by the modality `audio` and by `frame.entrypoints.audio`. Must not know a model, a process or a
request.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator

import numpy as np

RATE = 16_000  # samples a second of all features
RATES = (4_000, 384_000)
MAX_CHANNELS = 32
MAX_DENSITY = 384_000  # samples of all channels in a second; bounds the work on a second of sound
_BLOCK_SECONDS = 10  # of a file that are converted at a time
_EDGE_SECONDS = 0.1  # around a block, against ringing at its ends

Read = Callable[[int], np.ndarray]  # frames -> float32 [at most so many, channels]


class TooLongError(ValueError):
    """The sound has more seconds than it may have."""


def open_wave(data: bytes) -> tuple[Read, Callable[[], None], int, int, int] | None:
    """A WAV file of whole numbers: how to read and to close it, its frames, rate and channels. None
    for any other file."""
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
        samples = np.frombuffer(file.readframes(count), np.uint8)
        samples = samples[: len(samples) // (width * channels) * width * channels].reshape(-1, width)
        if width == 1:
            return ((samples[:, 0].astype(np.float32) - 128) / 128).reshape(-1, channels)
        whole = np.zeros((len(samples), 4), np.uint8)
        whole[:, 4 - width :] = samples
        return (whole.view("<i4")[:, 0].astype(np.float32) / 2**31).reshape(-1, channels)

    held = len(data) // (width * channels)  # the head of a stream says 2 ** 32 bytes
    return (read, file.close, min(file.getnframes(), held), file.getframerate(), channels)


def read_blocks(read: Read, rate: int, max_seconds: float) -> Iterator[np.ndarray]:
    """Blocks of mono samples, float32. Raises TooLongError."""
    total, size = 0, rate * _BLOCK_SECONDS
    while len(block := read(size)):
        total += len(block)
        if total > rate * max_seconds:
            raise TooLongError
        yield np.nan_to_num(block.mean(axis=1), posinf=0.0, neginf=0.0)
        if len(block) < size:
            return


def resample(blocks: Iterator[np.ndarray], rate: int) -> Iterator[np.ndarray]:
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
        count = max(round(len(joined) * RATE / rate), end - offset)  # an edge may be no whole number of samples at `RATE`
        yield _transform(joined, count)[first - offset : end - offset]
        start += len(block)
        before, block = block[-edge:], after


def _transform(samples: np.ndarray, count: int) -> np.ndarray:
    if not count:  # less than half a sample at `RATE`
        return np.zeros(0, np.float32)
    spectrum = np.fft.rfft(samples)
    size = count // 2 + 1
    kept = np.zeros(size, spectrum.dtype)
    kept[: min(size, len(spectrum))] = spectrum[:size]
    return (np.fft.irfft(kept, count) * (count / max(1, len(samples)))).astype(np.float32)
