"""`AdapterRegistry`: the adapters of a server, and which version each name means.

A name that is loaded again gets a new version; requests that run end on the old one. Used by
servers; vLLM's and SGLang's counterpart is the LoRA registry of the tokenizer manager. Must not
know HTTP.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from frame.config.server_sections import AdaptersSection
from frame.core.errors import ConfigurationError
from frame.core.messages import Finish
from frame.entrypoints.engine_client.adapter_placement import AdapterPlacement
from frame.entrypoints.engine_client.adapter_spool import (
    AdapterCounts,
    AdapterSpool,
    AdapterUse,
    AdapterVersion,
    NamedAdapter,
    SpooledAdapter,
)
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError, InvalidRequestError
from frame.interfaces.adapter import AdapterError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+-]{0,127}")  # it goes into a header, and `:` parts it from the base model's
MAX_NAMES = 10_000
MAX_COPIES = 4  # adapters that are copied at once
MAX_LABELS = 100  # names in the metrics; the others are OTHER
OTHER = "other"


class UnknownAdapterError(LookupError):
    """No adapter that the tenant may use has the name."""


class AdapterNameError(AdapterError):
    """A new adapter cannot have the name."""


class AdapterRegistry:
    """Not thread-safe: every method runs in the event loop's thread. `clients`: those of all
    replicas. `reserved`: names of the base model."""

    def __init__(self, clients: Sequence[EngineClient], settings: AdaptersSection, spool: AdapterSpool, reserved: Collection[str]) -> None:
        self._settings = settings
        self.spool = spool
        self.num_waiting = 0  # requests whose adapters are not in host memory yet
        self.counts = AdapterCounts()
        self._clients = clients
        self._reserved = reserved
        self._names: dict[tuple[str, str], NamedAdapter] = {}  # by owner and name
        self._versions: dict[str, AdapterVersion] = {}  # by digest
        self.placement = AdapterPlacement(clients, settings.max_loaded, self._versions)
        self._copying = asyncio.Semaphore(MAX_COPIES)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()  # of loads, by owner and name
        self._tasks: set[asyncio.Task[None]] = set()

    # names ----------------------------------------------------------------------------------------

    def find(self, name: str, tenant: str) -> NamedAdapter | None:
        """The adapter that a tenant's requests mean by a name: its own before those for all."""
        return self._names.get((tenant, name)) or self._names.get(("", name))

    def list_adapters(self, tenant: str | None) -> list[NamedAdapter]:
        """What a tenant may use; None: all."""
        return [named for named in self._names.values() if tenant is None or named.owner in ("", tenant)]

    def list_versions(self) -> list[AdapterVersion]:
        """All that names or requests have."""
        return list(self._versions.values())

    def describe(self) -> list[dict[str, Any]]:
        """All adapters, as `/server_info` shows them."""
        return [
            {
                **{key: value for key, value in named.version.info.items() if key != "invocation"},
                "name": named.name, "owner": named.owner, "digest": named.version.digest,
                "loaded": self.placement.is_ready(named.version), "users": named.version.num_users,
            }
            for named in self._names.values()
        ]  # fmt: skip

    # orders of operators --------------------------------------------------------------------------

    async def load_modules(self) -> None:
        """Load `adapters.modules`. Raises ConfigurationError."""
        for module in self._settings.modules:
            name, _, folder = module.partition("=")
            try:
                await self.load_folder(name, folder)
            except (AdapterError, EngineDeadError, TimeoutError) as error:
                raise ConfigurationError(f"adapters.modules: {module}: {error}") from error

    async def load_folder(self, name: str, folder: str, owner: str = "", roots: Sequence[str] | None = None) -> NamedAdapter:
        """Load an adapter as a name's version for new requests, and return when all engines have
        it. `roots`: see `AdapterSpool.copy_folder`. Raises AdapterError, EngineDeadError,
        TimeoutError."""
        self.check_name(name, owner)
        async with self._lock_of(name, owner):  # the last load of a name wins
            async with self._copying:
                files = await asyncio.to_thread(self.spool.copy_folder, folder, roots)
            return await self._add(name, owner, files, folder)

    async def load_files(self, name: str, files: SpooledAdapter, owner: str = "") -> NamedAdapter:
        """`load_folder` of an adapter that is in the spool."""
        async with self._lock_of(name, owner):
            return await self._add(name, owner, files)

    def check_name(self, name: str, owner: str = "") -> None:
        """Raise AdapterNameError for a name that a new adapter cannot have."""
        if not NAME.fullmatch(name):
            raise AdapterNameError("an adapter's name has up to 128 letters, digits and ._/+- and begins with a letter, a digit or _")
        if name in self._reserved:
            raise AdapterNameError(f"{name!r} is the base model's name; choose another for the adapter")
        if len(self._names) >= MAX_NAMES and (owner, name) not in self._names:
            raise AdapterNameError(f"the server has {MAX_NAMES} adapters, its limit; unload some")

    def _lock_of(self, name: str, owner: str) -> asyncio.Lock:
        return self._locks.setdefault((owner, name), asyncio.Lock())

    async def _add(self, name: str, owner: str, files: SpooledAdapter, folder: str = "") -> NamedAdapter:
        async with self.placement.lock:
            version = self._versions.get(files.digest)
            if version is None:
                version = self._versions[files.digest] = AdapterVersion(files, self._handle_release)
            else:
                self._run(asyncio.to_thread(self.spool.remove, files))  # a second copy
            version.acquire()
            try:
                old = self._names.get((owner, name))
                if old is not None and old.version is version:
                    return old
                self.check_name(name, owner)  # again: others came meanwhile
                await self.placement.place(version)
                if (reason := self.placement.find_missing(version)) is not None:
                    raise EngineDeadError(reason)
                version.num_names += 1
                named = self._names[owner, name] = NamedAdapter(name, owner, int(time.time()), version, folder)
                if old is not None:
                    self._forget_name(old)
                return named
            finally:
                version.release()

    async def unload(self, name: str, owner: str = "", aborts: bool = False) -> None:
        """Take a name away, and return when its requests have ended and no engine has what it
        meant. `aborts`: they end now. Raises UnknownAdapterError."""
        if (named := self._names.pop((owner, name), None)) is None:
            raise UnknownAdapterError(name)
        self._forget_name(named)
        if aborts:
            for client in self._clients:
                client.abort_adapter(named.version, Finish("abort"), name)
        while named.version.num_users and not named.version.num_names:
            await self.placement.wait_release()
        await self._drop(named.version)

    def _forget_name(self, named: NamedAdapter) -> None:
        named.version.num_names -= 1
        if not named.version.num_users:
            self._handle_release(named.version)

    def _handle_release(self, version: AdapterVersion) -> None:
        """No request uses the version any more."""
        self.placement.wake()
        if not version.num_names:
            self._run(self._drop(version))

    async def _drop(self, version: AdapterVersion) -> None:
        """Free a version that neither a name nor a request has."""
        async with self.placement.lock:
            if version.num_names or version.num_users or self._versions.get(version.digest) is not version:
                return
            await self.placement.unload(version)
            del self._versions[version.digest]
        await asyncio.to_thread(self.spool.remove, version.files)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # requests -------------------------------------------------------------------------------------

    async def acquire(self, names: Collection[str], tenant: str) -> Mapping[str, AdapterUse]:
        """The versions that these names mean now, each acquired and in host memory; the caller
        releases them once its sequences have started. Raises UnknownAdapterError, AdapterError,
        InvalidRequestError, TimeoutError."""
        if len(names) > self.placement.max_loaded:
            sentence = f"the request names {len(names)} adapters, and the server holds {self.placement.max_loaded} (adapters.max_loaded)"
            raise InvalidRequestError(f"{sentence}; send several requests", "lora_path")
        uses: dict[str, AdapterUse] = {}
        if all(self.placement.is_ready(self._need(name, tenant).version) for name in names):
            for name in names:
                self.placement.touch(self._use(name, tenant, uses))
            return uses
        self.num_waiting += 1
        try:
            async with self.placement.lock:  # in turn, so that no two requests wait for each other
                for name in names:
                    await self.placement.place(self._use(name, tenant, uses))
        except BaseException:
            for use in uses.values():
                use.version.release()
            raise
        finally:
            self.num_waiting -= 1
        return uses

    def _use(self, name: str, tenant: str, uses: dict[str, AdapterUse]) -> AdapterVersion:
        """Acquire the version of a name for a request. Raises UnknownAdapterError."""
        named = self._need(name, tenant)
        known = self.counts.tokens
        label = name if not named.owner and (name in known or len(known) < MAX_LABELS) else OTHER
        known[label] += 0
        uses[name] = AdapterUse(name, named.version, label, self.counts)
        named.version.acquire()
        return named.version

    def _need(self, name: str, tenant: str) -> NamedAdapter:
        if (named := self.find(name, tenant)) is None:
            raise UnknownAdapterError(name)
        return named
