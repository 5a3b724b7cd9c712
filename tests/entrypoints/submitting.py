"""Starts a request in the engine's client, as the routes do."""

from __future__ import annotations

from collections.abc import Sequence

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.engine_client.response_state import RequestState


def submit_request(
    client: EngineClient | ReplicaClient, prompts: Sequence[list[int]], params: Sequence[SamplingParams], rid: str | None = None
) -> RequestState:
    """Start every prompt `params.n` times; the room is reserved."""
    request = client.prepare_request(prompts, params, rid)
    try:
        for sequence in request.sequences:
            client.start_sequence(sequence)
    except BaseException:
        client.cancel_request(request)
        raise
    return request
