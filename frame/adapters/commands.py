"""`AdapterCommands`: loads and unloads adapters on all ranks while steps run.

Used by the engine's loop for the commands `load_adapter` and `unload_adapter`; `AdapterLoader` is a
rank's side, which reads files in a thread. Must not know names of adapters or requests.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.core.blame import explain
from frame.core.interfaces.runner import AdapterOrder, PendingOrder
from frame.core.messages import Control, ControlReply
from frame.interfaces.adapter import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from frame.adapters.adapter_reader import AdapterReader
    from frame.adapters.host_adapters import HostAdapter
    from frame.adapters.places import AdapterPlaces, AdapterVersions
    from frame.core.interfaces.runner import ModelRunner

log = logging.getLogger(__name__)

COPY_BYTES_PER_SECOND = 20e9  # from pinned memory over PCIe, about; a step waits if it was less


class RankOrder:
    """An order of one rank; see `PendingOrder`."""

    def __init__(self, future: Future[str]) -> None:
        self._future = future

    def poll(self) -> str | None:
        return self._future.result() if self._future.done() else None


class AdapterLoader:
    """One rank's adapters in host memory. Called by the thread that runs steps; files are read in
    another one."""

    def __init__(self, make_reader: Callable[[], AdapterReader], loaded: dict[str, HostAdapter], activate: Callable[[], None]) -> None:
        """activate: makes the device the thread's own."""
        self._make_reader = make_reader
        self._reader: AdapterReader | None = None
        self._loaded = loaded  # by digest; steps read it
        self._thread = ThreadPoolExecutor(1, "adapters", activate)

    def start_order(self, order: AdapterOrder) -> RankOrder:
        """See `ModelRunner.start_order`. Orders are carried out one after another."""
        return RankOrder(self._thread.submit(self._carry_out, order))

    def _carry_out(self, order: AdapterOrder) -> str:
        if not order.folder:
            self._loaded.pop(order.digest, None)
            return ""
        try:
            self._reader = self._reader or self._make_reader()
            self._loaded[order.digest] = self._reader.read(Path(order.folder))
        except AdapterError as error:
            return str(error)
        except Exception as error:
            log.exception("an adapter could not be loaded")
            return f"the adapter could not be loaded: {explain(error)}"
        return ""


@dataclass(slots=True)
class _Pending:
    control: Control | None  # None: no client waits
    digest: str
    order: PendingOrder


class AdapterCommands:
    """Rank 0's side. A reply is sent when every rank has carried out the order."""

    def __init__(
        self,
        runner: ModelRunner,
        loaded: dict[str, HostAdapter],
        versions: AdapterVersions,
        places: Sequence[AdapterPlaces],
    ) -> None:
        self._runner = runner
        self._loaded = loaded
        self._versions = versions
        self._places = places
        self._pending: list[_Pending] = []

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, control: Control) -> ControlReply | None:
        """Begin a command; None: `take_replies` has the reply later."""
        digest, folder = str(control.arguments["digest"]), str(control.arguments.get("folder", ""))
        known = self._versions.by_digest.get(digest)
        if control.action == "load_adapter":
            if known is not None:
                return self._describe(control, digest)
            if any(each.digest == digest for each in self._pending):
                return ControlReply(id=control.id, ok=False, error="the adapter is being loaded; try again", code="conflict")
        else:
            folder = ""
            if known is not None and known.num_requests:
                return ControlReply(id=control.id, ok=False, error="requests use the adapter; abort them first", code="conflict")
            self._versions.by_digest.pop(digest, None)
            for places in self._places:
                places.forget(digest)
        self._pending.append(_Pending(control, digest, self._runner.start_order(AdapterOrder(digest, folder))))
        return None

    def take_replies(self) -> list[ControlReply]:
        """Return the replies to orders that every rank has carried out."""
        replies, pending = [], []
        for each in self._pending:
            error = each.order.poll()
            if error is None:
                pending.append(each)
            elif each.control is None:
                continue
            elif error:
                if each.control.action == "load_adapter":  # other ranks may have it
                    pending.append(_Pending(None, each.digest, self._runner.start_order(AdapterOrder(each.digest))))
                replies.append(ControlReply(id=each.control.id, ok=False, error=error))
            else:
                replies.append(self._end(each.control, each.digest))
        self._pending = pending
        return replies

    def _end(self, control: Control, digest: str) -> ControlReply:
        if control.action != "load_adapter":
            return ControlReply(id=control.id, ok=True)
        adapter = self._loaded[digest]
        seconds = adapter.pages.nbytes / COPY_BYTES_PER_SECOND if adapter.pages.is_pinned() else 0.0
        self._versions.add_version(digest, len(adapter.pages), adapter.config.invocation, seconds)
        return self._describe(control, digest)

    def _describe(self, control: Control, digest: str) -> ControlReply:
        adapter = self._loaded[digest]
        data: dict[str, Any] = {
            "rank": adapter.config.rank, "pages": len(adapter.pages), "bytes": adapter.pages.nbytes,
            "base_model": adapter.config.base_model, "invocation": list(adapter.config.invocation),
        }  # fmt: skip
        return ControlReply(id=control.id, ok=True, data=data)
