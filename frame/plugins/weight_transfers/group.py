"""`group`: broadcasts of a trainer in a torch process group, whose rank 0 is the trainer.

The rendezvous is SGLang's: the trainer serves a TCP store, and the ranks of engines follow from
`rank_offset` on. The backend is made directly, beside torch's global groups, so that names of
groups may be used again and nothing is left after `close`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
from pydantic import BaseModel
from torch import distributed

from frame.core.interfaces.weight_transfer import TensorSpec, TransferError, TransferPart
from frame.host.gloo_group import find_own_address, make_gloo_group
from frame.interfaces.weight_transfer import WeightTransfer, WeightTransferContext

DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # by backend: the prefix that torch puts before the keys of its store
PING = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 1)  # torch's VALIDATE and PING, with which its own clients begin
RETRY = 0.1  # seconds between two attempts to reach the trainer
TRAINER = 0  # its rank
WATCHDOG_GRACE = timedelta(seconds=60)


class GroupInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's `init_weights_update_group`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"

    def check(self, num_ranks: int) -> None:
        """Raises TransferError for values that make no group."""
        if self.backend not in DEVICES:
            raise TransferError(f"backend is {self.backend!r}; the backends are {' and '.join(DEVICES)}")
        if not distributed.is_nccl_available() and self.backend == "nccl":
            raise TransferError("backend is nccl, which this build of torch does not have; set backend to gloo")
        if not 0 < self.master_port < 1 << 16:
            raise TransferError(f"master_port is {self.master_port}, which is no port")
        if not self.master_address or not self.group_name:
            raise TransferError("master_address and group_name must not be empty")
        if self.rank_offset < 1 or self.rank_offset + num_ranks > self.world_size:
            raise TransferError(
                f"rank_offset {self.rank_offset} and the {num_ranks} rank(s) of this engine do not fit into world_size {self.world_size}: "
                "rank 0 is the trainer"
            )


class GroupTransfer(WeightTransfer):
    """One process group with a trainer."""

    def __init__(self, context: WeightTransferContext, options: BaseModel | None = None) -> None:
        self._context = context
        self._timeout = timedelta(seconds=context.timeout)
        self._group: Any = None
        self._left = threading.Event()

    def open(self, info: Mapping[str, Any]) -> None:
        try:
            settings = msgspec.convert(dict(info), GroupInfo)
        except msgspec.ValidationError as error:
            raise TransferError(f"the fields of the group are wrong: {error}") from None
        settings.check(self._context.num_ranks)
        if settings.backend == "nccl" and self._context.device.type != "cuda":
            raise TransferError(f"backend is nccl, but the model is on {self._context.device.type}; set backend to gloo")
        self.close()
        left = self._left = threading.Event()
        try:
            await_trainer(settings, self._context.timeout, left)
            self._group = self._join(settings)
        except Exception as error:
            where = f"{settings.master_address}:{settings.master_port}"
            raise TransferError(f"the group {settings.group_name!r} at {where} was not formed: {first_line(error)}") from error

    def _join(self, info: GroupInfo) -> Any:
        rank = info.rank_offset + self._context.rank
        host = f"[{info.master_address}]" if ":" in info.master_address else info.master_address
        store, _, _ = next(distributed.rendezvous(f"tcp://{host}:{info.master_port}", rank, info.world_size, timeout=self._timeout))
        store.set_timeout(self._timeout)
        for prefix in (info.group_name, f"{info.group_name}/", f"{DEVICES[info.backend]}/"):  # as torch makes it
            store = distributed.PrefixStore(prefix, store)
        if info.backend == "gloo":
            own = find_own_address(info.master_address, info.master_port)
            return make_gloo_group(store, rank, info.world_size, self._timeout, own)
        options = distributed.ProcessGroupNCCL.Options()
        # longer than `_broadcast` waits: torch ends a process whose collective takes longer
        options._timeout = self._timeout + WATCHDOG_GRACE  # noqa: SLF001 - torch's name
        return distributed.ProcessGroupNCCL(store, rank, info.world_size, options)

    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise TransferError("the group was not formed, or a transfer over it failed; call init_weights_update_group")
        if part.buffers:
            raise TransferError("a group sends no buffers; leave them out")
        if part.layout == "flattened":
            flat = self._broadcast(torch.empty(part.num_bytes, dtype=torch.uint8, device=self._device))
            start = 0
            for spec in part.tensors:
                piece = flat[start : start + spec.num_bytes].clone()  # of any offset, so that a wider type can view it
                start += spec.num_bytes
                yield spec.name, piece.view(getattr(torch, spec.dtype)).view(spec.shape)
            return
        for spec in part.tensors:
            yield spec.name, self._broadcast(make_empty(spec, self._device))

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if isinstance(self._group, distributed.ProcessGroupGloo) else self._context.device

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        options = distributed.BroadcastOptions()
        options.rootRank = TRAINER
        try:
            self._group.broadcast([tensor], options).wait(self._timeout)
        except Exception as error:
            self.close()  # the order of broadcasts is lost
            raise TransferError(f"the trainer's broadcast did not come: {first_line(error)}") from error
        return tensor

    def close(self) -> None:
        self._left.set()
        group, self._group = self._group, None
        if group is not None:
            group.abort() if hasattr(group, "abort") else group.shutdown()


def await_trainer(info: GroupInfo, timeout: float, left: threading.Event) -> None:
    """Return when the store at the trainer's address answers: torch's client waits without a limit
    for one that accepts a connection and is silent. Raises OSError or TransferError after `timeout`
    seconds, and TransferError when the channel is left."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((info.master_address, info.master_port), min(timeout, 5.0)) as connection:
                connection.sendall(PING)
                connection.settimeout(RETRY)
                await_answer(connection, deadline, left)
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        if left.wait(RETRY):
            raise TransferError("it was left before")


def await_answer(connection: socket.socket, deadline: float, left: threading.Event) -> None:
    """Return when something comes over the connection, or its end. deadline: of `time.monotonic`.
    Raises as `await_trainer`."""
    while not left.is_set():
        with contextlib.suppress(TimeoutError):
            connection.recv(64)  # of a store that does not know the ping: its end of the connection
            return
        if time.monotonic() > deadline:
            sentence = "the trainer accepts connections and does not answer"
            raise TransferError(f"{sentence}; let it continue or start it again, and call init_weights_update_group again")
    raise TransferError("it was left before")


def make_empty(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
