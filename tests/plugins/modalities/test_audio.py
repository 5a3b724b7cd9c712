"""Sound against the reference processors of transformers, and hostile files."""

from __future__ import annotations

import io
import struct
import sys
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import VoxtralProcessor

from frame.core.errors import ConfigurationError
from frame.interfaces.modality import MediaError, MediaLimits, ModalityContext
from frame.plugins.modalities.audio import AudioModality
from frame.plugins.modalities.processor import build_processor, load_feature_extractor, load_tokenizer
from frame.testing.modality.folders import write_folder

NAMES = ("qwen2_audio", "voxtral", "qwen3_omni", "gemma4")


def make(seconds: float, rate: int = 16_000, channels: int = 1) -> tuple[bytes, np.ndarray]:
    """A WAV file of 16 bits, and its samples as mono float32."""
    count = round(seconds * rate)
    samples = np.random.default_rng(0).integers(-20_000, 20_000, (count, channels), np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return file.getvalue(), (samples.astype(np.float32) / 32768).mean(axis=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AudioModality]:
    folder = tmp_path_factory.mktemp("families")
    return {name: AudioModality(ModalityContext(folder / name, write_folder(folder / name, name))) for name in NAMES}


def build_reference(modality: AudioModality) -> tuple[Any, Any]:
    """transformers' processor of the checkpoint, and its feature extractor."""
    folder, extractor = modality.context.folder, load_feature_extractor(modality.context.folder)
    return build_processor(folder, modality.context.model_config, load_tokenizer(folder), feature_extractor=extractor), extractor


@pytest.mark.parametrize("seconds", [0.2, 1.0, 7.33, 29.99, 30.0])
def test_qwen2_audio_is_the_processors(built: dict[str, AudioModality], seconds: float) -> None:
    modality = built["qwen2_audio"]
    data, samples = make(seconds)
    size = modality.read_size(data)
    reference, _ = build_reference(modality)
    expected, texts = reference._process_audio([samples], sampling_rate=16_000, return_tensors="np")
    assert modality.lay_out(size, {}).expansion == texts[0]
    got = modality.compute_features(data, size, {})
    for name in ("input_features", "feature_attention_mask"):
        assert np.abs(got[name] - np.asarray(expected[name])).max() < 1e-6


@pytest.mark.parametrize("seconds", [0.0126, 0.0371, 0.999, 1.0, 7.337, 30.01])
def test_qwen3_omni_is_the_processors(built: dict[str, AudioModality], seconds: float) -> None:
    """Sound of any length, without padding."""
    modality = built["qwen3_omni"]
    data, samples = make(seconds)
    size = modality.read_size(data)
    reference, _ = build_reference(modality)
    expected, texts = reference._process_audio([samples], return_tensors="np", **reference.audio_kwargs)
    assert modality.lay_out(size, {}).expansion == texts[0]
    got = modality.compute_features(data, size, {})
    assert set(got) == {"input_features", "feature_attention_mask"}
    for name, array in got.items():
        assert array.shape == np.asarray(expected[name]).shape and np.abs(array - np.asarray(expected[name])).max() < 1e-6


@pytest.mark.parametrize("seconds", [0.0101, 0.0201, 0.06, 0.371, 1.0, 7.337, 12.0])
def test_gemma4_is_the_processors(built: dict[str, AudioModality], seconds: float) -> None:
    """Frames of a length that is padded to 128 samples, of which the last ones are masked."""
    modality = built["gemma4"]
    data, samples = make(seconds)
    size = modality.read_size(data)
    reference, extractor = build_reference(modality)
    expected = extractor([samples], sampling_rate=16_000, return_tensors="np")
    assert modality.lay_out(size, {}).expansion == reference.replace_audio_token(expected, 0)
    got = modality.compute_features(data, size, {})
    assert set(got) == {"input_features", "input_features_mask"}
    assert np.abs(got["input_features"] - expected["input_features"]).max() < 1e-6
    assert np.array_equal(got["input_features_mask"], expected["input_features_mask"])


@pytest.mark.parametrize("seconds", [0.5, 30.0, 30.1, 61.0])
def test_voxtral_is_the_processors(built: dict[str, AudioModality], seconds: float) -> None:
    modality = built["voxtral"]
    data, samples = make(seconds)
    size = modality.read_size(data)
    reference, _ = build_reference(modality)
    module = sys.modules[VoxtralProcessor.__module__]  # a version before 5.20 has them elsewhere
    values = getattr(VoxtralProcessor, "audio_kwargs", None) or module.VoxtralProcessorKwargs._defaults["audio_kwargs"]
    arguments = {**values, "return_tensors": "pt"}
    positions = arguments.pop("max_source_positions")
    expected = reference._retrieve_input_features([samples], positions, **arguments).numpy()
    got = modality.compute_features(data, size, {})["input_features"]
    assert got.shape == expected.shape and np.abs(got - expected).max() < 1e-6
    assert modality.lay_out(size, {}).expansion == modality.placeholder * 375 * len(expected)


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (44_100, 2), (48_000, 6), (11_025, 1)])
def test_rates_and_channels(built: dict[str, AudioModality], rate: int, channels: int) -> None:
    for seconds in (1.2345, 12.0):
        data, _ = make(seconds, rate, channels)
        size = built["qwen2_audio"].read_size(data)
        assert abs(size.seconds - seconds) < 0.001
        assert built["qwen2_audio"].compute_features(data, size, {})["feature_attention_mask"].sum() == -(
            -round(size.seconds * 16_000) // 160
        )


def test_lengths(built: dict[str, AudioModality]) -> None:
    with pytest.raises(MediaError, match="may have 30"):
        built["qwen2_audio"].read_size(make(30.5)[0])
    with pytest.raises(MediaError, match="may have 12"):  # 300 rows of 40 milliseconds
        built["gemma4"].read_size(make(12.1)[0])
    voxtral = built["voxtral"]
    short = AudioModality(ModalityContext(voxtral.context.folder, voxtral.context.model_config, MediaLimits(max_seconds=5)))
    with pytest.raises(MediaError, match="may have 5"):
        short.read_size(make(6)[0])
    for name, seconds in (("qwen2_audio", 0.0), ("qwen2_audio", 0.001), ("qwen3_omni", 0.0125), ("gemma4", 0.01)):
        data = make(seconds)[0]
        with pytest.raises(MediaError, match=r"no samples|too short"):
            built[name].lay_out(built[name].read_size(data), {})
    with pytest.raises(MediaError, match="'format' is no option"):
        voxtral.lay_out(voxtral.read_size(make(1)[0]), {"format": "wav"})


def test_options_of_the_server_are_refused(built: dict[str, AudioModality]) -> None:
    for modality in built.values():
        with pytest.raises(ConfigurationError, match="bogus is no option"):
            AudioModality(replace(modality.context, processor_options={"bogus": 1}))


def test_forged_heads(built: dict[str, AudioModality]) -> None:
    data = bytearray(make(1)[0])
    for rate in (0, 1, 3_999, 400_000, 2**31):
        forged = data[:24] + struct.pack("<I", rate) + data[28:]
        with pytest.raises(MediaError):
            built["voxtral"].read_size(bytes(forged))
    many = data[:40] + struct.pack("<I", 2**31) + data[44:]
    size = built["voxtral"].read_size(bytes(many))
    assert size.seconds < 1.1
    for broken in (b"", b"RIFF", b"RIFF\0\0\0\0WAVE", b"OggS", b"ID3" + bytes(50), bytes(data[:30])):
        with pytest.raises(MediaError):
            built["voxtral"].read_size(broken)


def test_heads_of_streams_and_of_cut_files(built: dict[str, AudioModality]) -> None:
    """They say a length that the file does not have."""
    data, samples = make(1)
    for head in (2**31, 2**32 - 1):
        streamed = data[:40] + struct.pack("<I", head) + data[44:]
        for modality in built.values():
            size = modality.read_size(streamed)
            assert size.seconds * 16_000 == len(samples)
            expected = modality.compute_features(data, modality.read_size(data), {})
            assert np.array_equal(modality.compute_features(streamed, size, {})["input_features"], expected["input_features"])
    cut = data[:20_001]
    assert built["voxtral"].compute_features(cut, built["voxtral"].read_size(cut), {})


def test_other_architectures(tmp_path: Path) -> None:
    config = write_folder(tmp_path, "qwen2_vl")
    with pytest.raises(ConfigurationError, match="qwen2_vl"):
        AudioModality(ModalityContext(tmp_path, config))
