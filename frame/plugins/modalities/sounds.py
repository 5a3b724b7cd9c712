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
    processor: the objects in config.json and processor_config.json."""

    def __init__(self, extractor: Any, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.extractor, self.processor = extractor, processor
        self.audio: Mapping[str, Any] = config.get("audio_config") or {}

    @property
    def max_seconds(self) -> float:
        """Of a sound."""
        return float("inf")

    def count_rows(self, samples: int) -> tuple[int, int]:
        """-> rows, and positions of the encoder (`MediaLayout.patches`)."""
        raise NotImplementedError

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """samples: float32 [samples], 16 kHz. -> the arrays of the encoder, one item."""
        raise NotImplementedError

    def _extract(self, samples: np.ndarray | list[np.ndarray], **arguments: Any) -> dict[str, np.ndarray]:
        return as_arrays(self.extractor(samples, sampling_rate=RATE, return_tensors="np", **arguments))

    def _extract_masked(self, samples: np.ndarray, **arguments: Any) -> dict[str, np.ndarray]:
        outputs = self._extract(samples, return_attention_mask=True, **arguments)
        return {"input_features": outputs["input_features"], "feature_attention_mask": outputs["attention_mask"]}


class Qwen2AudioReader(SoundReader):
    """One window of 30 seconds, whose rows are those of whole pairs of positions."""

    @property
    def max_seconds(self) -> float:
        return int(self.extractor.n_samples) / RATE

    def count_rows(self, samples: int) -> tuple[int, int]:
        length = -(-samples // self.extractor.hop_length)
        return (((length - 1) // 2 + 1) - 2) // 2 + 1, int(self.extractor.n_samples) // (2 * self.extractor.hop_length)

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return self._extract_masked(samples, padding="max_length")


class VoxtralReader(SoundReader):
    """Whole windows of 30 seconds."""

    def count_rows(self, samples: int) -> tuple[int, int]:
        window = int(self.extractor.n_samples)
        positions, width = int(self.audio.get("max_source_positions", 1500)), int(self.audio.get("hidden_size", 1280))
        windows, rows = -(-samples // window), positions * width // int(self.audio.get("intermediate_size", 4 * width))
        return windows * rows, windows * window // (2 * self.extractor.hop_length)

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        window = int(self.extractor.n_samples)
        padded = self._extract(samples, padding=True, truncation=False, pad_to_multiple_of=window)
        features = np.asarray(padded["input_features"], np.float32).reshape(self.extractor.feature_size, -(-len(samples) // window), -1)
        return {"input_features": np.ascontiguousarray(features.transpose(1, 0, 2))}


class Qwen3OmniReader(SoundReader):
    """Chunks of frames, each divided by eight and rounded up, without padding."""

    def count_rows(self, samples: int) -> tuple[int, int]:
        chunk = 2 * int(self.audio.get("n_window", 50))
        whole, rest = divmod(samples // self.extractor.hop_length, chunk)
        rows = whole * -(-chunk // 8) + -(-rest // 8) if samples > self.extractor.n_fft // 2 else 0
        return rows, rows

    def compute_features(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return self._extract_masked(samples, padding=True, truncation=False)


class Gemma4Reader(SoundReader):
    """Frames whose window is within the sound, halved twice and rounded up."""

    @property
    def max_seconds(self) -> float:
        milliseconds = int(self.processor.get("audio_ms_per_token") or 40)
        return int(self.processor.get("audio_seq_length") or 750) * milliseconds / 1000

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
