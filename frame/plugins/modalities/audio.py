"""`AudioModality`: sound for language models, by the checkpoint's feature extractor.

WAV files are read by the standard library, others by `soundfile`, where it is installed. Must not
know a process: this one has limits.
"""

from __future__ import annotations

import importlib.util
import io
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.errors import ConfigurationError
from frame.interfaces.modality import MediaError, MediaLayout, MediaSize, ModalityContext
from frame.media.sound import MAX_CHANNELS, MAX_DENSITY, RATE, RATES, Read, TooLongError, open_wave, read_blocks, resample
from frame.plugins.modalities.processor import (
    ProcessorModality,
    check_names,
    find_row_token,
    load_feature_extractor,
    load_tokenizer,
    read_settings,
    refuse_unknown,
)
from frame.plugins.modalities.sounds import READERS

if TYPE_CHECKING:
    from pydantic import BaseModel

_log = logging.getLogger(__name__)
_DAMAGED = "the file is damaged, or is no audio that can be read; send it as WAV"
_BLOCK = 1 << 16  # frames


class AudioModality(ProcessorModality):
    """Sound for one checkpoint. Raises ConfigurationError for an architecture whose expansion it
    does not know."""

    def __init__(self, context: ModalityContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        full = context.model_config.full_config
        read = READERS.get(str(full.get("model_type")))
        if read is None:
            sentence = f"audio of the model type {full.get('model_type')} is not supported, only of {' and '.join(READERS)}"
            raise ConfigurationError(f"{sentence}; leave audio out of media.modalities.")
        check_names(context.processor_options, set(), "feature extractor")
        tokenizer = load_tokenizer(context.folder)
        self._placeholder = self._row_token = find_row_token(context.model_config, tokenizer, "audio", None)
        # between which a processor writes the rows, where a chat template does not
        self._before, self._after = (getattr(tokenizer, name, None) or "" for name in ("boa_token", "eoa_token"))
        extractor = load_feature_extractor(context.folder)
        if extractor.sampling_rate != RATE:
            sentence = f"the feature extractor of {context.folder} reads {extractor.sampling_rate} samples a second, not {RATE}."
            raise ConfigurationError(sentence)
        self._reader = read(extractor, full, read_settings(context.folder / "processor_config.json"))

    def read_size(self, data: bytes) -> MediaSize:
        read, frames, rate, name = self._open(data)
        if frames == 0 or name == "WAV":  # the header does not say, or is that of a stream
            frames = self._count(read, rate)
        if frames == 0:
            raise MediaError("the file has no samples; send one with sound")
        samples = round(frames * RATE / rate)
        limit = min(self.context.limits.max_seconds, self._reader.max_seconds)
        if samples > limit * RATE:
            raise MediaError(f"the file has {samples / RATE:.1f} seconds, and may have {limit:g}; send it in parts")
        return MediaSize(name, seconds=samples / RATE)

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        refuse_unknown(options, ())
        rows, patches = self._reader.count_rows(round(size.seconds * RATE))
        if rows < 1:
            raise MediaError("the file is too short for the model; send one of 0.1 seconds at least")
        return MediaLayout(f"{self._before}{self._row_token * rows}{self._after}", patches=patches)

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        read, _, rate, _ = self._open(data)
        try:
            samples = np.concatenate([np.zeros(0, np.float32), *resample(read_blocks(read, rate, self.context.limits.max_seconds), rate)])
        except TooLongError:
            raise MediaError(f"the file is longer than {self.context.limits.max_seconds:g} seconds; send it in parts") from None
        if len(samples) != round(size.seconds * RATE):
            raise MediaError("the file's header says another length than its sound has; send it again as WAV")
        return self._reader.compute_features(samples)

    def _count(self, read: Read, rate: int) -> int:
        """Decode all frames, to count them, up to the limit."""
        frames = 0
        while (block := len(read(_BLOCK))) and frames <= self.context.limits.max_seconds * rate:
            frames += block
        return frames

    def _open(self, data: bytes) -> tuple[Read, int, int, str]:
        """-> how to read it, its frames by the header (0: unknown), its rate and its format."""
        wave = open_wave(data)
        if wave is not None:
            read, _, frames, rate, channels = wave
            name = "WAV"
        else:
            read, frames, rate, channels, name = self._open_other(data)
        if not (RATES[0] <= rate <= RATES[1] and 1 <= channels <= MAX_CHANNELS and rate * channels <= MAX_DENSITY):
            raise MediaError(f"the file has {channels} channels of {rate} samples a second; send one channel of {RATE}")
        return read, frames, rate, name

    def _open_other(self, data: bytes) -> tuple[Read, int, int, int, str]:
        if importlib.util.find_spec("soundfile") is None:
            raise MediaError("the file is no WAV file of whole numbers; convert it, or install soundfile on the server")
        import soundfile

        try:
            file = soundfile.SoundFile(io.BytesIO(data))
        except (RuntimeError, TypeError, ValueError) as error:
            _log.info("a sound does not open: %s", error)
            raise MediaError(_DAMAGED) from None

        def read(count: int) -> np.ndarray:
            try:
                block: np.ndarray = file.read(count, dtype="float32", always_2d=True)
            except RuntimeError as error:
                _log.info("a sound does not decode: %s", error)
                raise MediaError(_DAMAGED) from None
            return block

        frames = 0 if file.format == "MP3" or file.frames > 1 << 60 else file.frames
        return read, frames, file.samplerate, file.channels, file.format
