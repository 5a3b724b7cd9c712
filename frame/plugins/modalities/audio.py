"""`AudioModality`: sound for language models, by the checkpoint's feature extractor (Qwen2-Audio,
arXiv 2407.10759; Voxtral, arXiv 2507.13264; Qwen3-Omni, arXiv 2509.17765).

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
    as_arrays,
    check_names,
    find_row_token,
    load_feature_extractor,
    load_tokenizer,
    refuse_unknown,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

_log = logging.getLogger(__name__)
_DAMAGED = "the file is damaged, or is no audio that can be read; send it as WAV"
_BLOCK = 1 << 16  # frames
_OMNI = "qwen3_omni_moe_thinker"
_SUPPORTED = ("qwen2_audio", "voxtral", _OMNI)


class AudioModality(ProcessorModality):
    """Sound for one checkpoint. Raises ConfigurationError for an architecture whose expansion it
    does not know."""

    def __init__(self, context: ModalityContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        full = context.model_config.full_config
        self._kind = str(full.get("model_type"))
        if self._kind not in _SUPPORTED:
            sentence = f"audio of the model type {self._kind} is not supported, only of {' and '.join(_SUPPORTED)}"
            raise ConfigurationError(f"{sentence}; leave audio out of media.modalities.")
        check_names(context.processor_options, set(), "feature extractor")
        self._placeholder = self._row_token = find_row_token(context.model_config, load_tokenizer(context.folder), "audio", None)
        self._extractor = load_feature_extractor(context.folder)
        if self._extractor.sampling_rate != RATE:
            rate = self._extractor.sampling_rate
            raise ConfigurationError(f"the feature extractor of {context.folder} reads {rate} samples a second, not {RATE}.")
        audio = full.get("audio_config") or {}
        self._window = int(self._extractor.n_samples)  # samples that the encoder reads at once
        positions, width = int(audio.get("max_source_positions", 1500)), int(audio.get("hidden_size", 1280))
        self._window_rows = positions * width // int(audio.get("intermediate_size", 4 * width))
        self._chunk = 2 * int(audio.get("n_window", 50))  # frames that Qwen3-Omni's convolutions read at once

    def read_size(self, data: bytes) -> MediaSize:
        read, frames, rate, name = self._open(data)
        if frames == 0 or name == "WAV":  # the header does not say, or is that of a stream
            frames = self._count(read, rate)
        if frames == 0:
            raise MediaError("the file has no samples; send one with sound")
        samples = round(frames * RATE / rate)
        limit = min(self.context.limits.max_seconds, self._window / RATE if self._kind == "qwen2_audio" else float("inf"))
        if samples > limit * RATE:
            raise MediaError(f"the file has {samples / RATE:.1f} seconds, and may have {limit:g}; send it in parts")
        return MediaSize(name, seconds=samples / RATE)

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        refuse_unknown(options, ())
        samples, hop = round(size.seconds * RATE), self._extractor.hop_length
        windows = -(-samples // self._window)
        patches = windows * self._window // (2 * hop)
        if self._kind == "voxtral":
            rows = windows * self._window_rows
        elif self._kind == _OMNI:  # no padding; each chunk is divided by eight, rounded up
            whole, rest = divmod(samples // hop, self._chunk)
            rows = patches = whole * -(-self._chunk // 8) + -(-rest // 8) if samples > self._extractor.n_fft // 2 else 0
        else:
            length = -(-samples // hop)
            rows = (((length - 1) // 2 + 1) - 2) // 2 + 1
        if rows < 1:
            raise MediaError("the file is too short for the model; send one of 0.1 seconds at least")
        return MediaLayout(self._row_token * rows, patches=patches)

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        read, _, rate, _ = self._open(data)
        try:
            samples = np.concatenate([np.zeros(0, np.float32), *resample(read_blocks(read, rate, self.context.limits.max_seconds), rate)])
        except TooLongError:
            raise MediaError(f"the file is longer than {self.context.limits.max_seconds:g} seconds; send it in parts") from None
        if len(samples) != round(size.seconds * RATE):
            raise MediaError("the file's header says another length than its sound has; send it again as WAV")
        arguments = {"sampling_rate": RATE, "return_tensors": "np"}
        if self._kind != "voxtral":
            padding = {"padding": True, "truncation": False} if self._kind == _OMNI else {"padding": "max_length"}
            outputs = as_arrays(self._extractor(samples, return_attention_mask=True, **padding, **arguments))
            return {"input_features": outputs["input_features"], "feature_attention_mask": outputs["attention_mask"]}
        padded = self._extractor(samples, padding=True, truncation=False, pad_to_multiple_of=self._window, **arguments)
        features = np.asarray(padded["input_features"], np.float32)
        windows = -(-len(samples) // self._window)
        split = features.reshape(self._extractor.feature_size, windows, -1).transpose(1, 0, 2)
        return {"input_features": np.ascontiguousarray(split)}

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
