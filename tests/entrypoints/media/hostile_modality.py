"""A modality whose files say what decoding them does: they end the process, take memory or time,
or are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from frame import hookimpl
from frame.interfaces.modality import MediaError, MediaLayout, MediaSize, Modality, ModalityCapabilities
from frame.registration import KindRegistry


class HostileModality(Modality):
    @property
    def placeholder(self) -> str:
        return "<image>"

    @property
    def row_token(self) -> str:
        return "<row>"

    def read_size(self, data: bytes) -> MediaSize:
        return MediaSize("TEXT", len(data), 1)

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        return MediaLayout("<row>" * size.width, patches=size.width)

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        action, _, argument = data.partition(b":")
        if action == b"crash" or (action == b"once" and not self._was_seen(argument)):
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == b"memory":
            return {"rows": np.ones(1 << 40, np.uint8)}
        if action == b"spin":
            while True:
                pass
        if action == b"sleep":
            signal.pause()
        if action == b"refuse":
            raise MediaError("the file is refused; send another")
        if action == b"fail":
            raise RuntimeError("secret of the decoder")
        if action == b"descriptors":
            for handle in Path("/proc/self/fd").iterdir():
                if handle.is_socket():
                    raise MediaError(f"descriptor {handle.name} is a socket")
        return {"rows": np.frombuffer(data, np.uint8), "pid": np.array([os.getpid()]), "nice": np.array([os.nice(0)])}

    @staticmethod
    def _was_seen(path: bytes) -> bool:
        seen = Path(os.fsdecode(path)).exists()
        Path(os.fsdecode(path)).touch()
        return seen


@hookimpl
def register_modalities(registry: KindRegistry) -> None:
    registry.add("hostile", HostileModality, capabilities=ModalityCapabilities("image"))
