"""`OfflineAdapters`: the adapters of an offline engine, by name or folder. Used by `Engine`, in any
thread. Must not know a session: `send` runs an order in the engine of now."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frame.config.server_sections import AdaptersSection
from frame.core.messages import ControlReply
from frame.entrypoints.engine_client.adapter_spool import AdapterSpool, SpooledAdapter
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.prompts import EngineError

Lora = str | Path  # an adapter's name or folder
OFF = "this engine has no adapters; open it with enable_lora=True"


class OfflineAdapters:
    """`find_session` returns the session of now, whose engine has lost the adapters of the one
    before."""

    def __init__(
        self, settings: AdaptersSection, tokenizer: str | None, send: Callable[..., ControlReply], find_session: Callable[[], Any]
    ) -> None:
        self._settings = settings
        self._spool = AdapterSpool(tokenizer)
        self._send = send
        self._find_session = find_session
        self._changed = threading.Condition()
        self._names: dict[str, str] = {}  # name or folder -> digest
        self._files: dict[str, SpooledAdapter] = {}  # by digest
        self._users: Counter[str] = Counter()  # jobs, by digest
        self._held: dict[str, None] = {}  # digests in the engine's host memory, least recently used first
        self._session: Any = None

    def load(self, name: str, folder: str) -> str:
        """Load an adapter as a name's version for new calls. Returns its digest. Raises
        AdapterError, EngineError."""
        if not self._settings.enabled:
            raise InvalidRequestError(OFF, "lora")
        files = self._spool.copy_folder(folder)
        digest = files.digest
        with self._changed:
            if self._files.setdefault(digest, files) is not files:
                self._spool.remove(files)
        with self.hold([digest]):
            self.place([digest])
            with self._changed:
                old, self._names[name] = self._names.get(name), digest
                self._forget(old)
        return digest

    def unload(self, name: str) -> None:
        """Take a name away, once the calls that use it have ended. Raises InvalidRequestError."""
        with self._changed:
            if (digest := self._names.pop(name, None)) is None:
                raise InvalidRequestError(f"there is no adapter {name!r}; load it first", "lora")
            while self._users[digest] and digest not in self._names.values():
                self._changed.wait()
            self._forget(digest)

    def find(self, lora: Lora | Sequence[Lora | None] | None, count: int) -> list[str]:
        """The digests for `count` prompts, "" for none; a folder is loaded the first time. Raises
        InvalidRequestError, AdapterError, EngineError."""
        if lora is None:
            return [""] * count
        several = [lora] * count if isinstance(lora, str | Path) else list(lora)
        if len(several) != count:
            raise InvalidRequestError(f"there are {count} prompts but {len(several)} adapters; give one, or one for each prompt", "lora")
        return ["" if each is None else self._find_one(str(each)) for each in several]

    def _find_one(self, lora: str) -> str:
        with self._changed:
            digest = self._names.get(lora)
        if digest is None and self._settings.enabled and not Path(lora).is_dir():
            raise InvalidRequestError(f"{lora!r} is neither the name of a loaded adapter nor a folder", "lora")
        return self.load(lora, lora) if digest is None else digest

    @contextmanager
    def hold(self, digests: Collection[str]) -> Iterator[None]:
        """Keep adapters for a job, once there is room for them. Raises InvalidRequestError."""
        distinct, maximum = {*digests} - {""}, self._settings.max_loaded
        if len(distinct) > maximum:
            sentence = f"the call names {len(distinct)} adapters, and the engine holds {maximum} (adapters.max_loaded)"
            raise InvalidRequestError(f"{sentence}; make several calls", "lora")
        with self._changed:
            while len(distinct | {digest for digest, count in self._users.items() if count}) > maximum:
                self._changed.wait()
            if not distinct <= self._files.keys():
                raise InvalidRequestError("the adapter was unloaded meanwhile; load it again", "lora")
            self._users.update(distinct)
        try:
            yield
        finally:
            with self._changed:
                self._users.subtract(distinct)
                for digest in distinct:
                    self._forget(digest)
                self._changed.notify_all()

    def place(self, digests: Collection[str]) -> Any:
        """Load adapters that are held into the engine of now. Returns its session. Raises
        EngineError."""
        with self._changed:
            if (session := self._find_session()) is not self._session:
                self._session, self._held = session, {}
            for digest in {*digests} - {""}:
                while digest not in self._held and len(self._held) >= self._settings.max_loaded:
                    self._evict()
                if digest not in self._held:
                    folder = str(self._files[digest].folder)
                    while not (reply := self._send("load_adapter", digest=digest, folder=folder)).ok:
                        if reply.code != "conflict" or all(self._users[each] for each in self._held):
                            raise EngineError(reply.error or "the adapter was not loaded")
                        self._evict()
                self._held.pop(digest, None)
                self._held[digest] = None
            return session

    def _evict(self) -> None:
        digest = next(each for each in self._held if not self._users[each])
        self._unload(digest)

    def _unload(self, digest: str) -> None:
        if digest in self._held:
            del self._held[digest]
            self._send("unload_adapter", digest=digest)

    def _forget(self, digest: str | None) -> None:
        """Free what neither a name nor a job has. The lock is held."""
        if digest in self._files and not self._users[digest] and digest not in self._names.values():
            self._unload(digest)
            self._spool.remove(self._files.pop(digest))

    def close(self) -> None:
        """Delete the copies."""
        self._spool.close()
