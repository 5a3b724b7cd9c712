"""Manifest of the in-tree modalities: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.modality import ModalityCapabilities
from frame.registration import KindRegistry, hookimpl

PILLOW = "pillow>=12.2,<14"


@hookimpl
def register_modalities(registry: KindRegistry) -> None:
    """Add the in-tree modalities."""
    registry.add(
        "image",
        "frame.plugins.modalities.image:ImageModality",
        summary="Images, by the checkpoint's image processor in its PIL form.",
        capabilities=ModalityCapabilities("image", ("PNG", "JPEG", "WebP", "GIF", "BMP")),
        requires=[PILLOW],
    )
    registry.add(
        "video",
        "frame.plugins.modalities.video:VideoModality",
        summary="Videos, whose frames are sampled as the checkpoint's video processor does.",
        capabilities=ModalityCapabilities("video", ("MP4", "WebM", "MKV")),
        requires=[PILLOW, "av>=16,<19"],
    )
    registry.add(
        "audio",
        "frame.plugins.modalities.audio:AudioModality",
        summary="Sound, by the checkpoint's feature extractor.",
        capabilities=ModalityCapabilities("audio", ("WAV", "FLAC", "MP3", "Ogg")),
    )
