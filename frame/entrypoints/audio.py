"""Audio for speech models: files to samples, samples to windows, windows to log-mel features.

WAV files are read by the standard library, others by `soundfile` in a process of its own, where it
is installed. All work is bounded by the size of the file and `MAX_SECONDS`, and is done block by
block, so that files can take turns. Used by `frame.entrypoints.speech`. Must not know a model or a
request; imports no torch.
"""

from __future__ import annotations

import importlib.util
import io
import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from frame.entrypoints.audio_process import AudioProcess, DamagedError, UnreadableError
from frame.entrypoints.engine_client.limits import InvalidRequestError

RATE = 16_000  # samples a second of all features
MAX_BYTES = 25 * 1024 * 1024  # of a file, as in the OpenAI API
MAX_SECONDS = 1800
HOP = 160  # samples between two frames
_WINDOW = 400  # samples of a frame
_RATES = (4_000, 384_000)
_MAX_CHANNELS = 32
_MAX_DENSITY = 384_000  # samples of all channels in a second; bounds the work on a second of sound
_UNKNOWN_LENGTH = 1 << 62  # frames; libsndfile says so of files without a length
_BLOCK_SECONDS = 10  # of a file that are converted at a time
_EDGE_SECONDS = 0.1  # around a block, against ringing at its ends
_QUIET_SECONDS = 3  # at the end of a window, in which it may be cut
_QUIET_FRAME = RATE // 20

Read = Callable[[int], np.ndarray]  # frames -> float32 [at most so many, channels]


@dataclass(frozen=True, slots=True)
class AudioFile:
    """An open file. `num_frames`: by its head, which may be wrong; 0: unknown."""

    read: Read
    close: Callable[[], None]
    num_frames: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        """By the head of the file; 0: unknown."""
        return self.num_frames / self.rate


def open_audio(data: bytes) -> AudioFile:
    """Open a file, without decoding it. Raises InvalidRequestError for a file that cannot be read
    or is too long."""
    if len(data) > MAX_BYTES:
        raise InvalidRequestError(f"the file has {len(data)} bytes, and may have {MAX_BYTES}; send a shorter or compressed one", "file")
    file = _open_wave(data) or _open_other(data)
    try:
        _check_head(file)
    except BaseException:
        file.close()
        raise
    return file


def read_audio(file: AudioFile) -> Iterator[np.ndarray]:
    """Blocks of samples, float32 [n], mono, `RATE` a second. Raises InvalidRequestError for a file
    that is damaged, empty or too long."""
    size = 0
    for block in _resample(_read_blocks(file.read, file.rate), file.rate):
        size += len(block)
        yield block
    if not size:
        raise InvalidRequestError("the file has no samples; send one with sound", "file")


def _check_head(file: AudioFile) -> None:
    rate, channels = file.rate, file.channels
    if not (_RATES[0] <= rate <= _RATES[1] and 1 <= channels <= _MAX_CHANNELS):
        allowed = f"1 to {_MAX_CHANNELS} channels of {_RATES[0]} to {_RATES[1]}"
        raise InvalidRequestError(f"the file has {channels} channels of {rate} samples a second; send {allowed}", "file")
    if rate * channels > _MAX_DENSITY:
        sentence = f"the file has {channels} channels of {rate} samples a second; send at most {_MAX_DENSITY} samples a second in all"
        raise InvalidRequestError(f"{sentence}, such as one channel of {RATE}", "file")
    if rate * MAX_SECONDS < file.num_frames < _UNKNOWN_LENGTH:
        raise _too_long()


def _too_long() -> InvalidRequestError:
    return InvalidRequestError(f"the file is longer than {MAX_SECONDS} seconds; send it in parts", "file")


def _open_wave(data: bytes) -> AudioFile | None:
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
        samples = np.frombuffer(file.readframes(count), np.uint8)
        samples = samples[: len(samples) // (width * channels) * width * channels].reshape(-1, width)
        if width == 1:
            return ((samples[:, 0].astype(np.float32) - 128) / 128).reshape(-1, channels)
        whole = np.zeros((len(samples), 4), np.uint8)
        whole[:, 4 - width :] = samples
        return (whole.view("<i4")[:, 0].astype(np.float32) / 2**31).reshape(-1, channels)

    held = len(data) // (width * channels)  # the head of a stream says 2 ** 32 bytes
    return AudioFile(read, file.close, min(file.getnframes(), held), file.getframerate(), channels)


def _open_other(data: bytes) -> AudioFile:
    if importlib.util.find_spec("soundfile") is None:
        sentence = "the file is no WAV file of whole numbers; convert it, or install soundfile, the extra audio, on the server"
        raise InvalidRequestError(sentence, "file")
    damaged = InvalidRequestError("the file is damaged, or takes too much memory or time to decode; send it again as WAV", "file")
    try:
        process = AudioProcess(data)
    except UnreadableError:
        raise InvalidRequestError("the file is no audio file that libsndfile reads; send WAV, FLAC, MP3 or Ogg", "file") from None
    except DamagedError:
        raise damaged from None

    def read(count: int) -> np.ndarray:
        try:
            return np.frombuffer(process.read(count), np.float32).reshape(-1, process.channels)
        except (DamagedError, ValueError):
            raise damaged from None

    return AudioFile(read, process.close, process.num_frames, process.rate, process.channels)


def _read_blocks(read: Read, rate: int) -> Iterator[np.ndarray]:
    """Blocks of mono samples, float32. Raises InvalidRequestError beyond `MAX_SECONDS`."""
    total, size = 0, rate * _BLOCK_SECONDS
    while len(block := read(size)):
        total += len(block)
        if total > rate * MAX_SECONDS:
            raise _too_long()
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


def split_windows(blocks: Iterable[np.ndarray], seconds: float) -> Iterator[tuple[float, np.ndarray]]:
    """(start in seconds, samples) of windows of at most `seconds`. A window that is not the last
    one ends where its end is quietest."""
    max_length, start, rest = int(seconds * RATE), 0, np.zeros(0, np.float32)
    for block in blocks:
        rest = np.concatenate((rest, block))
        while len(rest) > max_length:
            end = _find_quiet(rest[:max_length])
            yield start / RATE, rest[:end]
            start, rest = start + end, rest[end:]
    if len(rest):
        yield start / RATE, rest


def _find_quiet(samples: np.ndarray) -> int:
    """Where a window ends: in the quietest frame of its last seconds."""
    quiet = max(len(samples) // 2, len(samples) - _QUIET_SECONDS * RATE)
    frames = samples[quiet : quiet + (len(samples) - quiet) // _QUIET_FRAME * _QUIET_FRAME].reshape(-1, _QUIET_FRAME)
    return quiet + (int(np.square(frames).sum(1).argmin()) * 2 + 1) * _QUIET_FRAME // 2 if len(frames) else len(samples)


def extract_features(samples: np.ndarray, mel_bins: int, frames: int) -> np.ndarray:
    """The log-mel features of a window, float32 [mel_bins, frames], padded with silence; those of
    `WhisperFeatureExtractor` in transformers."""
    padded = np.zeros(frames * HOP, np.float32)
    padded[: len(samples)] = samples[: len(padded)]
    padded = np.pad(padded, _WINDOW // 2, mode="reflect")
    view = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[: frames * HOP : HOP]
    power = np.abs(np.fft.rfft(view * np.hanning(_WINDOW + 1)[:-1], axis=1)) ** 2
    log_energies = np.log10(np.maximum(_make_mel_filters(mel_bins) @ power.T, 1e-10))
    return ((np.maximum(log_energies, log_energies.max() - 8) + 4) / 4).astype(np.float32)


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
