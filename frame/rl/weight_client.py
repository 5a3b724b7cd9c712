"""`WeightClient`: replaces the weights of a running server or offline engine by those of a trainer.

Tensors have the names, shapes and, usually, types of the checkpoint, as a
Hugging Face model's `state_dict()` has them. Must not know the server's inner parts.

    client = WeightClient("http://localhost:30000")
    client.update(model.state_dict(), "step-1")  # through shared memory of this host
    client.join_group(host="10.0.0.1", device="cuda")  # from now on by broadcasts
    client.update(model.state_dict(), "step-2")
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Self

import torch
from torch import distributed

from frame.entrypoints.offline.engine import Engine
from frame.host.gloo_group import make_gloo_group
from frame.rl.buckets import FOLDER, Bucket, DeviceBucket, HostBucket, describe, split_buckets

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
BUCKET_BYTES = 512 << 20
ALIGNMENT = 256  # bytes of a tensor's offset in a bucket


class WeightUpdateError(RuntimeError):
    """An update failed: the sentence of the server."""


class WeightClient:
    """A connection to one server or engine. Not for several threads. api_key: the server's admin
    key. timeout: seconds of one message."""

    def __init__(self, target: str | Engine, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self._target = target
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._group: Any = None
        self._group_name = self._group_device = ""
        self._store: Any = None
        self._http: Any = None  # httpx.Client

    def get_world_size(self) -> int:
        """The number of the engine's ranks."""
        if isinstance(self._target, Engine):
            return self._target.world_size
        return int(self._request("GET", "/get_world_size")["world_size"])

    def join_group(self, host: str = "127.0.0.1", port: int = 0, device: str = "cpu") -> None:
        """Form a process group with all ranks of the engine, in which this process is rank 0. host:
        an address of this machine that the engine reaches; `port` 0: a free one. device: of the
        tensors, which chooses the backend."""
        self.leave_group()
        size, wait = 1 + self.get_world_size(), timedelta(seconds=self._timeout)
        self._store = distributed.TCPStore(host, port, size, is_master=True, timeout=wait, wait_for_workers=False)
        self._group_device = device
        name = self._group_name = f"frame-{uuid.uuid4().hex[:12]}"
        backend = distributed.get_default_backend_for_device(device)
        info = {"master_address": host, "master_port": self._store.port, "rank_offset": 1, "world_size": size, "backend": backend}
        store = self._store
        for prefix in (name, f"{name}/", f"{device}/"):
            store = distributed.PrefixStore(prefix, store)

        def join() -> None:
            if device == "cuda":
                self._group = distributed.ProcessGroupNCCL(store, 0, size, distributed.ProcessGroupNCCL.Options())
            else:
                self._group = make_gloo_group(store, 0, size, wait, host)

        self._together("open", join, kind="group", name=name, info={**info, "group_name": name})

    def leave_group(self) -> None:
        """Leave the group; updates then use shared memory again."""
        if self._group is not None:
            with contextlib.suppress(Exception):  # the server may have gone
                self._step("close", kind="group", name=self._group_name)
        self._group = self._store = None

    def update(self, tensors: Tensors, version: str | None = None, *, bucket_bytes: int = BUCKET_BYTES, partial: bool = False) -> str:
        """Replace the weights, and return the version that is served then. partial: tensors that
        are not sent keep their values. Raises WeightUpdateError; the engine then has the weights
        that it served before."""
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        update = self._step("begin")["update"]
        try:
            send = self._broadcast if self._group is not None else self._share
            send(split_buckets(pairs, bucket_bytes), update)
            served: str = self._step("commit", update=update, version=version, partial=partial)["weight_version"]
        except BaseException:
            with contextlib.suppress(Exception):  # it has ended, if the engine is starting again
                self._step("cancel", update=update)
            raise
        return served

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.leave_group()
        if self._http is not None:
            self._http.close()
            self._http = None

    # ----------------------------------------------------------------------------------------------

    def _broadcast(self, buckets: Iterable[Bucket], update: str) -> None:
        for bucket in buckets:
            for name, tensor in bucket:  # the server would wait in vain for a broadcast that fails here
                if tensor.device.type != self._group_device:
                    raise WeightUpdateError(
                        f"{name} is on {tensor.device.type}, and the group was joined for device={self._group_device!r}: move it there, "
                        "or call leave_group() first, which sends tensors through shared memory"
                    )

            def send(bucket: Bucket = bucket) -> None:
                works = [self._group.broadcast([tensor.detach().contiguous()], distributed.BroadcastOptions()) for _, tensor in bucket]
                for work in works:
                    work.wait()

            specs = [describe(name, tensor) for name, tensor in bucket]
            self._together("part", send, kind="group", name=self._group_name, tensors=specs, update=update)

    def _share(self, buckets: Iterable[Bucket], update: str) -> None:
        with contextlib.ExitStack() as stack:
            memory: HostBucket | DeviceBucket | None = None
            for bucket in buckets:
                size = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, tensor in bucket)
                is_device = bucket[0][1].is_cuda
                if memory is None or memory.size < size or is_device != isinstance(memory, DeviceBucket):
                    memory = DeviceBucket(size, bucket[0][1].device) if is_device else self._make_host_bucket(size, stack)
                specs, offset = [], 0
                for name, tensor in bucket:
                    memory.write(offset, tensor)
                    specs.append({**describe(name, tensor), "offset": offset})
                    offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
                self._step("part", kind="ipc", tensors=specs, buffers=[memory.describe()], update=update)

    @staticmethod
    def _make_host_bucket(size: int, stack: contextlib.ExitStack) -> HostBucket:
        try:
            return HostBucket(size, stack)
        except OSError as error:
            remedy = "give it more (--shm-size of a container), or send smaller buckets (bucket_bytes)"
            raise WeightUpdateError(f"{FOLDER} has no room for a bucket of {size / 2**20:,.0f} MiB ({error.strerror}): {remedy}") from None

    def _together(self, step: str, act: Callable[[], None], **fields: Any) -> None:
        """Send a step while this process takes part in a collective. The collective runs in a
        thread: it cannot be interrupted where the server refuses the step."""
        errors: list[BaseException] = []

        def work() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._step(step, **fields)
        thread.join()
        if errors:
            raise WeightUpdateError(f"the group with the server failed: {errors[0]}") from errors[0]

    def _step(self, step: str, **fields: Any) -> dict[str, Any]:
        if isinstance(self._target, Engine):
            from frame.entrypoints.offline.prompts import EngineError

            if step == "part":
                fields["part"] = {"tensors": fields.pop("tensors"), "buffers": fields.pop("buffers", [])}
            try:
                return self._target.transfer_weights(step, **fields)
            except EngineError as error:
                raise WeightUpdateError(str(error)) from error
        reply = self._request("POST", "/transfer_weights", {"step": step, **fields})
        return {**reply, "update": reply.get("update_id")}

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        import httpx

        try:
            if self._http is None:  # a client for each message would read the certificates of all authorities each time
                self._http = httpx.Client(base_url=str(self._target), headers=self._headers, timeout=self._timeout)
            response = self._http.request(method, path, json=body)
            data: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise WeightUpdateError(f"{path} failed: {error}") from error
        if response.status_code != 200:
            raise WeightUpdateError(data.get("error", {}).get("message") or f"{path} failed with status {response.status_code}")
        return data
