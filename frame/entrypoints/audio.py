"""Audio for speech models: files to samples, samples to windows, windows to log-mel features.

WAV files are read by the standard library, others by `soundfile` in a process of its own. All work
is bounded by the size of the file and `MAX_SECONDS`, and is done block by block, so that files can
take turns. Used by `frame.entrypoints.speech`. Must not know a model or a request; imports no
torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from frame.entrypoints.audio_process import AudioProcess, DamagedError, UnreadableError
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.media.sound import MAX_CHANNELS, MAX_DENSITY, RATE, RATES, Read, TooLongError, open_wave, read_blocks, resample

MAX_BYTES = 25 * 1024 * 1024  # of a file, as in the OpenAI API
MAX_SECONDS = 1800
HOP = 160  # samples between two frames
_WINDOW = 400  # samples of a frame
_UNKNOWN_LENGTH = 1 << 62  # frames; libsndfile says so of files without a length
_QUIET_SECONDS = 3  # at the end of a window, in which it may be cut
_QUIET_FRAME = RATE // 20


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
    wave = open_wave(data)
    file = _open_other(data) if wave is None else AudioFile(*wave)
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
    try:
        for block in resample(read_blocks(file.read, file.rate, MAX_SECONDS), file.rate):
            size += len(block)
            yield block
    except TooLongError:
        raise _too_long() from None
    if not size:
        raise InvalidRequestError("the file has no samples; send one with sound", "file")


def _check_head(file: AudioFile) -> None:
    rate, channels = file.rate, file.channels
    if not (RATES[0] <= rate <= RATES[1] and 1 <= channels <= MAX_CHANNELS):
        allowed = f"1 to {MAX_CHANNELS} channels of {RATES[0]} to {RATES[1]}"
        raise InvalidRequestError(f"the file has {channels} channels of {rate} samples a second; send {allowed}", "file")
    if rate * channels > MAX_DENSITY:
        sentence = f"the file has {channels} channels of {rate} samples a second; send at most {MAX_DENSITY} samples a second in all"
        raise InvalidRequestError(f"{sentence}, such as one channel of {RATE}", "file")
    if rate * MAX_SECONDS < file.num_frames < _UNKNOWN_LENGTH:
        raise _too_long()


def _too_long() -> InvalidRequestError:
    return InvalidRequestError(f"the file is longer than {MAX_SECONDS} seconds; send it in parts", "file")


def _open_other(data: bytes) -> AudioFile:
    if importlib.util.find_spec("soundfile") is None:
        sentence = "the file is no WAV file of whole numbers; convert it, or install soundfile on the server"
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
