"""Audio files of several keys are decoded in turn, window by window, and those of clients that have
gone are not."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.media import MediaItem
from frame.entrypoints.audio import RATE, AudioFile
from frame.entrypoints.engine_client.quotas import FairSemaphore, PlaceShares, QuotaExceededError, TenantQuotas
from frame.entrypoints.http.errors import ApiError, DisconnectedError
from frame.entrypoints.http.openai import transcriptions
from frame.entrypoints.http.openai.transcriptions import _decode_while_connected, decode_windows
from frame.entrypoints.speech import Speech, Window


class Files:
    """A file is `TENANT SECONDS`. `order` has the tenant of each block that was decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.num_open = 0
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(transcriptions, "open_audio", self.open)
        monkeypatch.setattr(transcriptions, "need_speech", lambda _: Reading())

    def open(self, data: bytes) -> AudioFile:
        tenant, seconds = data.decode().split()
        left = [int(seconds)]
        self.num_open += 1

        def read(count: int) -> np.ndarray:
            assert self.gate.wait(20)
            self.order.append(tenant)
            left[0] -= 10
            return np.zeros((count if left[0] >= 0 else 0, 1), np.float32)

        def close() -> None:
            self.num_open -= 1

        return AudioFile(read, close, int(seconds) * RATE, RATE, 1)


ITEM = MediaItem("audio", b"", [], 0, "", [])
LEASE: Any = None  # `Reading` keeps no features


class Reading(Speech):
    """Windows of ten seconds."""

    def __init__(self) -> None:
        self.window_seconds, self.input_shape = 10.0, (80, 1000)

    def read_windows(self, audio: AudioFile | np.ndarray, lease: Any) -> Any:
        assert isinstance(audio, AudioFile)
        while len(samples := audio.read(RATE * 10)):
            yield Window(0.0, len(samples) / RATE, ITEM)


def make_services(maximum: int = 2048) -> Any:
    server = SimpleNamespace(max_sequences_per_request=maximum)
    resolved = SimpleNamespace(user=SimpleNamespace(server=server))
    return SimpleNamespace(audio_files=FairSemaphore(8, 2), audio_turns=FairSemaphore(2), resolved=resolved)


class Context:
    def __init__(self, tenant: str, lease: Any = None) -> None:
        self.tenant, self.lease, self.held = tenant, lease, 0

    def hold(self, size: int) -> None:
        self.held += size

    def on_disconnect(self, act: Any) -> None:
        self.disconnect = act


async def test_a_short_file_waits_for_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    files, services = Files(monkeypatch), make_services()
    await decode_windows(Context("few"), services, b"few 10", LEASE)  # type: ignore[arg-type]
    files.gate.clear()
    many = [asyncio.create_task(decode_windows(Context("many"), services, b"many 1000", LEASE)) for _ in range(12)]  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    few = asyncio.create_task(decode_windows(Context("few"), services, b"few 10", LEASE))  # type: ignore[arg-type]
    files.gate.set()
    assert len(await asyncio.wait_for(few, 20)) == 1
    assert files.order.count("many") < 20  # of 1200
    assert files.num_open <= 3
    assert not any(task.done() for task in many)
    windows = await asyncio.wait_for(asyncio.gather(*many), 60)
    assert ({len(each) for each in windows}, files.num_open) == ({100}, 0)


async def test_sequences_are_counted_before_a_file_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(monkeypatch)
    with pytest.raises(ApiError, match="100 sequences"):
        await decode_windows(Context("a"), make_services(50), b"a 1000", LEASE)  # type: ignore[arg-type]
    with TenantQuotas(None, PlaceShares(100, 2)).open_lease("a") as lease, pytest.raises(QuotaExceededError, match="100 sequences"):
        await decode_windows(Context("a", lease), make_services(), b"a 1000", LEASE)  # type: ignore[arg-type]
    assert (files.order, files.num_open) == ([], 0)


async def test_the_file_of_a_client_that_has_gone_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    files, services = Files(monkeypatch), make_services()
    files.gate.clear()
    contexts = [Context("a") for _ in range(12)]
    waiting = [asyncio.create_task(_decode_while_connected(each, services, b"a 1000", LEASE)) for each in contexts]  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    for context in contexts[1:]:
        context.disconnect()
    files.gate.set()
    for task in waiting[1:]:
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(task, 20)
    assert len(await asyncio.wait_for(waiting[0], 20)) == 100
    assert (files.order.count("a") < 130, files.num_open) == (True, 0)
