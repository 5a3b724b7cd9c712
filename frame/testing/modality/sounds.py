"""Checks of a modality of sound: channels and rates of samples, and that each part of a file
counts. Used by the suite `modality/1`. Must not know a plugin by name."""

from __future__ import annotations

import numpy as np

from frame.interfaces.modality import MediaError
from frame.testing.conformance import SkipCheck
from frame.testing.modality.files import Maker, save_sound

RATE, SECONDS = 16_000, 1.5
BLOCK, PIECE = 1 << 16, RATE // 10  # frames that decoders often read at a time, and frames of silence
TONES = (220.0, 700.0, 1530.0, 2900.0)
HIGH = 13_000.0  # a tone that has 3 kHz where samples of 48 kHz are picked at 16 kHz
MAX_DIFFERENCE = 0.1  # of features of one sound at two rates, on average, in their deviation


def _make_noise(frames: int, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(5).integers(-30, 30, (frames, channels), np.int16) * 256


def _compare(maker: Maker, data: bytes, other: bytes, what: str) -> float:
    """By how much features differ: the mean, in their deviation, of the array that differs most."""
    try:
        one, two = maker.read(data), maker.read(other)
    except MediaError as error:
        raise SkipCheck(f"{what} is refused: {error}") from None
    if one.keys() != two.keys() or any(one[name].shape != two[name].shape for name in one):
        return float("inf")
    return max(float(np.abs(one[name] - two[name].astype(np.float64)).mean() / max(two[name].std(), 1e-6)) for name in one)


def check_channels_of_a_sound_are_averaged(maker: Maker) -> None:
    """Some recorders put two voices on two channels, or one voice on either of them."""
    noise = _make_noise(round(SECONDS * RATE), 2)
    for what, samples in (("the left", noise * [1, 0]), ("the right", noise * [0, 1]), ("each", noise)):
        mean = samples.sum(1, keepdims=True) // 2
        difference = _compare(maker, save_sound(samples), save_sound(mean), "a sound of two channels")
        assert difference < 1e-3, (
            f"sound on {what} of two channels has other features than the mean of both, by {difference:.3f}: average the channels"
        )


def check_rates_of_samples_are_read(maker: Maker) -> None:
    """One sound at several rates has nearly the same features, and a tone above the lower rate is
    not mirrored to low frequencies."""

    def make(rate: int, *more: float) -> bytes:
        times = np.arange(round(SECONDS * rate)) / rate
        noise = np.interp(times, np.arange(0, SECONDS, 5e-3), np.random.default_rng(6).normal(size=round(SECONDS / 5e-3)))
        tones = sum(np.sin(2 * np.pi * each * times) for each in (*TONES, *more))
        return save_sound((2500 * tones + 1500 * noise).astype(np.int16)[:, None], rate=rate)

    for rate, more in ((48_000, ()), (44_100, ()), (48_000, (HIGH,))):
        what = f"a sound of {rate} samples a second{' with a tone that is too high for the model' if more else ''}"
        difference = _compare(maker, make(rate, *more), make(RATE), what)
        assert difference < MAX_DIFFERENCE, (
            f"{what} has other features than at {RATE}, by {difference:.2f}: resample with a low-pass filter"
        )


def check_each_part_of_a_sound_counts(maker: Maker) -> None:
    """A tenth of a second of silence changes the features, wherever it is: at the ends of the file
    and of the blocks that decoders read, and where the file ends with a block."""
    short = save_sound(_make_noise(2 * BLOCK - 1))
    _compare(maker, short, short, f"a sound of {2 * BLOCK / RATE:.1f} seconds")
    try:
        maker.read(save_sound(_make_noise(2 * BLOCK)))
    except MediaError as error:
        raise AssertionError(f"a sound of {2 * BLOCK} frames is refused, and one frame less is not: {error}") from None
    for frames, starts in ((2 * BLOCK, (0, BLOCK - PIECE, BLOCK)), (10 * RATE + 2 * PIECE, (10 * RATE - PIECE, 10 * RATE))):
        for start in (*starts, frames - PIECE):
            samples = _make_noise(frames)
            whole = save_sound(samples)
            samples[start : start + PIECE] = 0
            difference = _compare(maker, save_sound(samples), whole, f"a sound of {frames / RATE:.1f} seconds")
            assert difference > 1e-5, f"of {frames} frames those from {start} to {start + PIECE} do not count: read the file to its end"
