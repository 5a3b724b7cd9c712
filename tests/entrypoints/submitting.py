"""Starts a request in the engine's client, as the routes do; and a transport without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.engine_client.response_state import RequestState


class Link:
    """A transport that keeps what is sent, and delivers what a test puts into `inbox`."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.inbox: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, timeout: float | None = 0.0) -> list[Any]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def close(self) -> None:
        return


def submit_request(
    client: EngineClient | ReplicaClient, prompts: Sequence[list[int]], params: Sequence[SamplingParams], rid: str | None = None
) -> RequestState:
    """Start every prompt `params.n` times; the room is reserved."""
    request = client.prepare_request(prompts, params, rid)
    try:
        for sequence in request.sequences:
            client.start_sequence(sequence)
    except BaseException:
        client.abort_start(request)
        raise
    return request
