"""How the families of models read sound: rows of a length, and features by the checkpoint's
extractor (Qwen2-Audio, arXiv 2407.10759; Voxtral, arXiv 2507.13264; Qwen3-Omni, arXiv 2509.17765;
Gemma 4, whose encoder is a Universal Speech Model, arXiv 2303.01037).

Used by `AudioModality`. Must not know a file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from frame.media.sound import RATE
from frame.plugins.modalities.processor import as_arrays


class SoundReader:
    """Rows and features of one checkpoint. extractor: transformers' feature extractor; config,
    processor: the objects in config.json and processor_config.json. `max_seconds`: of a sound."""

    max_seconds = float("inf")

    def __init__(self, extractor: Any, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.extractor = extractor
        self.audio: Mapping[str, Any] = config.get("audio_config") or {}

    def count_rows(self, samples: int) -> tuple[int, int]:
        """-> rows, and positions of the encoder (`MediaLayout.patches`)."""
        raise NotImplementedError

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """samples: float32 [samples], 16 kHz. -> the arrays of the encoder, one item."""
        raise NotImplementedError

    def _extract(self, samples: np.ndarray | list[np.ndarray], **arguments: Any) -> dict[str, np.ndarray]:
        return as_arrays(self.extractor(samples, sampling_rate=RATE, return_tensors="np", **arguments))


class Qwen2AudioReader(SoundReader):
    """One window of 30 seconds, whose rows are those of whole pairs of positions."""

    def __init__(self, extractor: Any, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(extractor, config, processor)
        self.max_seconds = int(extractor.n_samples) / RATE

    def count_rows(self, samples: int) -> tuple[int, int]:
        length = -(-samples // self.extractor.hop_length)
        return (((length - 1) // 2 + 1) - 2) // 2 + 1, int(self.extractor.n_samples) // (2 * self.extractor.hop_length)

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        outputs = self._extract(samples, return_attention_mask=True, padding="max_length")
        return {"input_features": outputs["input_features"], "feature_attention_mask": outputs["attention_mask"]}


class VoxtralReader(SoundReader):
    """Whole windows of 30 seconds."""

    def __init__(self, extractor: Any, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(extractor, config, processor)
        self._window = int(extractor.n_samples)
        positions, width = int(self.audio.get("max_source_positions", 1500)), int(self.audio.get("hidden_size", 1280))
        self._window_rows = positions * width // int(self.audio.get("intermediate_size", 4 * width))

    def count_rows(self, samples: int) -> tuple[int, int]:
        windows = -(-samples // self._window)
        return windows * self._window_rows, windows * self._window // (2 * self.extractor.hop_length)

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        padded = self._extract(samples, padding=True, truncation=False, pad_to_multiple_of=self._window)
        windows = -(-len(samples) // self._window)
        split = np.asarray(padded["input_features"], np.float32).reshape(self.extractor.feature_size, windows, -1).transpose(1, 0, 2)
        return {"input_features": np.ascontiguousarray(split)}


class Qwen3OmniReader(SoundReader):
    """Chunks of frames, each divided by eight and rounded up, without padding."""

    def count_rows(self, samples: int) -> tuple[int, int]:
        chunk = 2 * int(self.audio.get("n_window", 50))
        whole, rest = divmod(samples // self.extractor.hop_length, chunk)
        rows = whole * -(-chunk // 8) + -(-rest // 8) if samples > self.extractor.n_fft // 2 else 0
        return rows, rows

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        outputs = self._extract(samples, return_attention_mask=True, padding=True, truncation=False)
        return {"input_features": outputs["input_features"], "feature_attention_mask": outputs["attention_mask"]}


class Gemma4Reader(SoundReader):
    """Frames whose window is within the sound, halved twice and rounded up."""

    def __init__(self, extractor: Any, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(extractor, config, processor)
        milliseconds = int(processor.get("audio_ms_per_token") or 40)
        self.max_seconds = int(processor.get("audio_seq_length") or 750) * milliseconds / 1000

    def count_rows(self, samples: int) -> tuple[int, int]:
        frames = (samples - self.extractor.frame_length + self.extractor.frame_length // 2 - 1) // self.extractor.hop_length + 1
        rows = -(-max(frames, 0) // 4)
        return rows, rows

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        outputs = self._extract([samples], truncation=False)  # a list, without which it takes samples for channels
        return {name: outputs[name] for name in ("input_features", "input_features_mask")}


READERS: Mapping[str, type[SoundReader]] = {  # by model_type
    "qwen2_audio": Qwen2AudioReader,
    "voxtral": VoxtralReader,
    "qwen3_omni_moe_thinker": Qwen3OmniReader,
    "gemma4": Gemma4Reader,
}
