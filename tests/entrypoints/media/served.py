"""Configurations with media for the tests of this folder, and files that clients send."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from frame.config.hardware import Hardware
from frame.config.resolved import PluginChoice, Resolved
from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.interfaces.modality import MediaPlan
from frame.plugins.loader import load_configured
from frame.testing.modality.folders import write_folder


def make_resolved(
    folder: Path, family: str = "qwen2_5_vl", modalities: tuple[str, ...] = ("image",), plugins_named: tuple[str, ...] = (), **sections: Any
) -> Resolved:
    """The resolved configuration of frame-tiny, with the processor of a family's checkpoint."""
    config = FrameConfig.model_validate(sections)
    resolved = prepare(config, Hardware(cpu_cores=2, memory_bytes=8 << 30)).resolved
    registry = load_configured(config.plugins)
    records = [registry.get("modality", name) for name in plugins_named or modalities]
    choices = [
        PluginChoice(kind="modality", name=each.name, target=each.target, distribution=each.distribution, version=each.version)
        for each in records
    ]
    plan = MediaPlan(table_rows=4096, encode_budget=4096, modalities=modalities)
    served = {"model_path": str(folder), "model": write_folder(folder, family), "media": plan}
    return resolved.model_copy(update={**served, "plugins": {**resolved.plugins, "modality": choices}})


def make_hostile(folder: Path, **media: Any) -> Resolved:
    """With the plugin of `hostile_modality`, whose processes start at once."""
    sections = {"media": {"processes": 1, **media}, "plugins": {"paths": [str(Path(__file__).with_name("hostile_modality.py"))]}}
    return make_resolved(folder, plugins_named=("hostile",), **sections)


def make_png(width: int = 64, height: int = 48, seed: int = 0, kind: str = "PNG") -> bytes:
    """A random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
