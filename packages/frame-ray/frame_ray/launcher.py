"""The launcher `ray`: Ray reserves the hosts and supervises one actor on each.

The first host is the one of `frame serve`, whose ranks are its child processes. The actor of each
other host runs its side of the launcher `rendezvous`, so that requests and tensors do not pass
through Ray. Ray starts an actor again that ends, on another host if its own is lost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from frame.core.errors import ConfigurationError
from frame.interfaces.launcher import LauncherContext, Placement, RankPlace, RankProcess
from frame.plugins.launchers.rendezvous import RendezvousLauncher, split_address
from frame.plugins.launchers.rendezvous_node import serve_node
from frame_ray.options import RayOptions

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in a job of `ray job submit`, which has chosen the folder of its workers

_handler = signal.getsignal(signal.SIGTERM)
import ray  # noqa: E402 - its import replaces the handler of SIGTERM
from ray.exceptions import RayError  # noqa: E402
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402


def _restore_handler() -> None:
    """Set the handler of SIGTERM that was there before ray."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _handler)


_restore_handler()


class RankHost:
    """The actor of one host, which holds the resources of its ranks."""

    def get_gpus(self) -> list[str]:
        """The GPUs of this host that Ray reserved."""
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())]

    def serve(self, number: int, host: str, port: int, key: bytes) -> None:
        """Run the ranks that the first host asks for, until it ends."""
        asyncio.run(serve_node(number, host, port, key))


class RayLauncher(RendezvousLauncher):
    """Ranks of `context.num_hosts` hosts of a Ray cluster. Raises ConfigurationError."""

    def __init__(self, context: LauncherContext, options: BaseModel | None = None) -> None:
        if context.host_rank:
            raise ConfigurationError("parallel.node_rank: Ray starts the other hosts; run frame serve once, without --node-rank")
        self.ray = options if isinstance(options, RayOptions) else RayOptions()
        self._is_owner = not ray.is_initialized()
        if self._is_owner:
            try:
                with tempfile.TemporaryDirectory() as empty:  # in place of this process's folder, which Ray's workers would import from
                    folder = {} if JOB_VARIABLE in os.environ else {"working_dir": empty}
                    ray.init(self.ray.address, log_to_driver=False, configure_logging=False, runtime_env=folder)
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise ConfigurationError(
                    f"parallel.launcher ray: no cluster at {self.ray.address!r} ({reason}); start one with `ray start --head`"
                ) from None
            finally:
                _restore_handler()
        if not context.address:
            own = ray.get_runtime_context().get_node_id()
            host = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
            context = replace(context, address=f"{host}:{_free_port(host)}")
        self._hosts: list[Any] = []
        self._group: PlacementGroup | None = None
        self._environment: dict[str, str] = {}
        super().__init__(context, options, secrets.token_bytes(32))

    def place(self) -> Placement:
        if not self._hosts:
            try:
                self._reserve()
            except RayError as error:
                raise OSError(f"Ray starts no actor for the ranks: {str(error).splitlines()[0]}") from None
        return super().place()

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        if place.rank < self.per_host:  # the other actors' processes inherit the GPUs of their actor
            environment = {**self._environment, **environment}
        return super().start(place, command, environment, pipes_errors=pipes_errors)

    def serve_node(self) -> None:
        raise NotImplementedError("the actors of Ray run the ranks of the other hosts")

    def close(self) -> None:
        super().close()
        for host in self._hosts:
            ray.kill(host)
        if self._group is not None:
            remove_placement_group(self._group)
        self._hosts, self._group = [], None
        if self._is_owner:
            ray.shutdown()

    def _reserve(self) -> None:
        """Reserve the resources of all hosts at once, and start their actors. Raises RayError."""
        hosts, each = self.context.num_hosts, self.ray.resources
        each = each or ({"GPU": 1.0} if ray.cluster_resources().get("GPU") else {"CPU": 1.0})
        bundle = {name: amount * self.per_host for name, amount in each.items()}
        own = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        selectors: list[dict[str, str]] = [own, *({} for _ in range(hosts - 1))]
        self._group = placement_group([bundle] * hosts, "STRICT_SPREAD", bundle_label_selector=selectors)
        if not self._group.wait(self.ray.patience):
            raise ConfigurationError(
                f"parallel.launcher ray: the cluster does not have {hosts} host(s), this one among them, with {bundle} free;"
                " see `ray status`, and set parallel.nnodes or the resources of plugins.options launcher/ray"
            )
        known = {"CPU": "num_cpus", "GPU": "num_gpus"}
        limits: dict[str, Any] = {"num_cpus": 0, **{known[name]: amount for name, amount in bundle.items() if name in known}}
        limits["resources"] = {name: amount for name, amount in bundle.items() if name not in known}
        actor = ray.remote(RankHost)
        for number in range(hosts):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            self._hosts.append(actor.options(**limits, scheduling_strategy=where, max_restarts=-1, max_task_retries=-1).remote())
        gpus = ray.get([host.get_gpus.remote() for host in self._hosts], timeout=self.ray.patience)
        self._environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[0])} if gpus[0] else {}
        address, port = split_address(self.context.address)
        for number, host in enumerate(self._hosts[1:], 1):
            host.serve.remote(number, address, port, self._key)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
