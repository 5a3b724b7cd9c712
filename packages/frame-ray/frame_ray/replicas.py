"""Replicas of `frame serve` by Ray Serve: `serve run frame_ray.replicas:build arguments=...`.

Each replica of the deployment starts a server on a port of its host's loopback and passes requests
to it. Ray Serve chooses the replica of a request, and replaces a replica whose server has ended.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from frame.entrypoints.router.connections import open_client
from frame.entrypoints.router.proxy import Proxy
from frame.entrypoints.router.replicas import Backends
from frame.host.interpreter import child_environment, python_command

_STEP = 0.2  # seconds between two questions whether a server is ready


class ReplicaOptions(BaseModel):
    """What `serve run` is given as NAME=VALUE."""

    model_config = ConfigDict(extra="forbid")

    arguments: str = Field("", description="Arguments of `frame serve` as in a shell, without --host and --port.")
    replicas: int = Field(1, ge=1, description="Number of replicas.")
    gpus: float = Field(0, ge=0, description="GPUs of a replica.")
    cpus: float = Field(1, ge=0, description="CPUs of a replica.")
    max_requests: int = Field(256, ge=1, description="Largest number of requests that a replica has at once.")
    max_body: int = Field(64 << 20, ge=1, description="Bytes of a request.")
    start_seconds: float = Field(1800, gt=0, description="Seconds for a server to get ready.")


class Forward:
    """The ASGI application of the process of a replica."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await serve.get_replica_context().servable_object.proxy(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})


class EngineReplica:
    """A server of its own, and the proxy to it. Raises RuntimeError where it does not start."""

    def __init__(self, options: ReplicaOptions) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        given = [*shlex.split(options.arguments), "--host", "127.0.0.1", "--port", str(port)]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(python_command("-m", "frame_ray.child", str(os.getpid()), *given), env=child_environment())
        self._wait_until_ready(options.start_seconds)
        client = open_client()
        self._backends = Backends((self.url,), client, 1.0)
        self.proxy = Proxy(self._backends, client, options.max_body)

    def _wait_until_ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"frame serve ended with {code}; the replica's log says why")
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(_STEP)
        self._process.kill()
        raise RuntimeError(f"frame serve was not ready in {seconds:g} s")

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises. A server that starts its ranks
        again stays."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"frame serve ended with {code}")
        (backend,) = self._backends.all
        if not backend.is_healthy:
            await self._backends.check(backend)

    def __del__(self) -> None:
        self._process.terminate()  # the server answers what it has begun


def build(given: dict[str, Any]) -> serve.Application:
    """The application that `serve run` deploys. `given`: fields of `ReplicaOptions`."""
    options = ReplicaOptions.model_validate(given)
    deployment = serve.deployment(
        name="frame",
        num_replicas=options.replicas,
        max_ongoing_requests=options.max_requests,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        health_check_period_s=2,
    )
    return deployment(serve.ingress(Forward())(EngineReplica)).bind(options)
