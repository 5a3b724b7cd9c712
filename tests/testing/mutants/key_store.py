"""Key stores with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreCapabilities, KeyStoreContext, KeyStoreError, name_tenant
from tests.testing.mutants import MutantList


class Digests(KeyStore):
    """Digests of keys, given as options."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.digests: dict[bytes, bool] = dict(options or {})

    @staticmethod
    def make_conformance_store(folder: Path, keys: dict[str, bool]) -> tuple[KeyStoreContext, Any]:
        return KeyStoreContext(), {hashlib.sha256(key.encode()).digest(): may for key, may in keys.items()}

    def digest(self, key: bytes) -> bytes:
        return hashlib.sha256(key).digest()

    def name(self, digest: bytes, key: bytes) -> str:
        return name_tenant(digest)

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        await asyncio.sleep(0)
        digest = self.digest(key)
        return KeyHolder(self.name(digest, key), self.digests[digest]) if digest in self.digests else None

    def count_tenants(self) -> int:
        return len(self.digests)


mutant = MUTANTS = MutantList("key_store", reference=Digests, capabilities=KeyStoreCapabilities(has_operators=True))


@mutant
class NamesByBeginnings(Digests):
    """Names a tenant by the first 8 characters of its key."""

    def name(self, digest: bytes, key: bytes) -> str:
        return name_tenant(key[:8])


@mutant
class NamesBySixtyFour(Digests):
    """Names a tenant by the first 64 characters of its key."""

    def name(self, digest: bytes, key: bytes) -> str:
        return name_tenant(key[:64])


@mutant
class NamesByCounting(Digests):
    """Numbers tenants in the order in which they come, which is another one after a restart."""

    numbers: Any = None

    def name(self, digest: bytes, key: bytes) -> str:
        self.numbers = self.numbers or {}
        return f"tenant-{self.numbers.setdefault(digest, len(self.numbers))}"


@mutant
class NamesByTheObject(Digests):
    """Names tenants by a hash with a secret of the object, which no other process has."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.secret = os.urandom(8)

    def name(self, digest: bytes, key: bytes) -> str:
        return hmac.digest(self.secret, digest, "sha256").hex()[:16]


@mutant
class NamesByTheKey(Digests):
    """Uses the key itself as the tenant's name, which logs show."""

    def name(self, digest: bytes, key: bytes) -> str:
        return key[-20:].decode()


@mutant
class HasOneTenant(Digests):
    """Gives all holders one name."""

    def name(self, digest: bytes, key: bytes) -> str:
        return "user"


@mutant
class StripsSpaces(Digests):
    """Strips spaces and line feeds, which are part of what was sent."""

    def digest(self, key: bytes) -> bytes:
        return super().digest(key.strip())


@mutant
class IgnoresCase(Digests):
    """Compares keys without regard to capitals."""

    def digest(self, key: bytes) -> bytes:
        return super().digest(key.lower())


@mutant
class CutsAtZero(Digests):
    """Reads a key up to the first zero byte, as C does."""

    def digest(self, key: bytes) -> bytes:
        return super().digest(key.partition(b"\0")[0])


@mutant
class DropsWhatIsNoText(Digests):
    """Decodes keys as ASCII, and fails for others."""

    def digest(self, key: bytes) -> bytes:
        return super().digest(key.decode("ascii").encode())


@mutant
class TakesTheFirstOfAList(Digests):
    """Splits keys at commas, and accepts the first."""

    def digest(self, key: bytes) -> bytes:
        return super().digest(key.split(b",")[0])


@mutant
class OpensForTheEmptyKey(Digests):
    """Accepts an empty key as a guest."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        return await super().find_holder(key) if key else KeyHolder("guest")


@mutant
class FailsForUnknownKeys(Digests):
    """Raises for an unknown key, so that the client is told to try again."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        if holder is None:
            raise KeyStoreError("there is no such key")
        return holder


@mutant
class MakesAllOperators(Digests):
    """Opens operators' routes for every key."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        return holder and KeyHolder(holder.tenant, True)


@mutant
class OpensAfterAnOperator(Digests):
    """Takes each holder for an operator once an operator has come."""

    seen = False

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        self.seen = self.seen or bool(holder and holder.is_operator)
        return holder and KeyHolder(holder.tenant, self.seen)


@mutant
class KeepsKeys(Digests):
    """Keeps the keys that it has accepted, as text."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.accepted: dict[bytes, KeyHolder] = {}

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = self.accepted.get(key) or await super().find_holder(key)
        if holder is not None:
            self.accepted[key] = holder
        return holder


@mutant
class RemembersFailures(Digests):
    """Remembers every unknown key for ever."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.rejected: dict[bytes, bool] = {}

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        if holder is None:
            self.rejected[self.digest(key)] = True
        return holder


@mutant
class SharesAcceptedKeys(Digests):
    """Keeps accepted digests in the class, for all stores."""

    accepted: ClassVar[dict[bytes, KeyHolder]] = {}

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        digest = self.digest(key)
        holder = self.accepted.get(digest) or await super().find_holder(key)
        if holder is not None:
            self.accepted[digest] = holder
        return holder


@mutant
class HasOnePlaceForTheKey(Digests):
    """Keeps the key that is looked up in the object while it waits."""

    current = b""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        self.current = self.digest(key)
        await asyncio.sleep(0)
        digest = self.current
        return KeyHolder(name_tenant(digest), self.digests[digest]) if digest in self.digests else None


@mutant
class CachesByPrefix(Digests):
    """Caches holders by the first 16 characters of a key."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.cache: dict[bytes, KeyHolder] = {}

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        place = hashlib.sha256(key[:16]).digest()
        holder = self.cache.get(place) or await super().find_holder(key)
        if holder is not None and len(self.cache) < 100:
            self.cache[place] = holder
        return holder


@mutant
class SharesACall(Digests):
    """Has one task for several lookups of a key, which the first client that leaves cancels."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.calls: dict[bytes, Any] = {}

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        digest = self.digest(key)
        if digest not in self.calls:
            self.calls[digest] = asyncio.create_task(self.look(key))
            self.calls[digest].add_done_callback(lambda _: self.calls.pop(digest, None))
        holder: KeyHolder | None = await self.calls[digest]
        return holder

    async def look(self, key: bytes) -> KeyHolder | None:
        await asyncio.sleep(0.02)
        return await super().find_holder(key)


@mutant
class Sleeps(Digests):
    """Waits for its database in the event loop."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        time.sleep(0.06)  # noqa: ASYNC251
        return await super().find_holder(key)


@mutant
class CountsNone(Digests):
    """Says that no tenant shares the server."""

    def count_tenants(self) -> int:
        return 0


@mutant
class ClosesOnce(Digests):
    """Fails when it is closed again."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.connection: Any = object()

    async def close(self) -> None:
        del self.connection


@mutant
class LeavesAThread(Digests):
    """Leaves a thread that keeps the process alive."""

    async def close(self) -> None:
        threading.Thread(target=time.sleep, args=(2,), name=f"keys-{id(self)}").start()


@mutant
class ReturnsAName(Digests):
    """Returns the tenant's name instead of a holder."""

    async def find_holder(self, key: bytes) -> Any:
        holder = await super().find_holder(key)
        return holder and holder.tenant


@mutant
class DropsTheLastKeys(Digests):
    """Knows the first eight keys of its place."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.digests = dict([*self.digests.items()][:8])


@mutant
class TakesSchemes(Digests):
    """Leaves out the word `Bearer` before a key, so that it accepts what was not given out."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        return await super().find_holder(key.removeprefix(b"Bearer "))


@mutant
class CutsLongKeys(Digests):
    """Compares the first 1,024 bytes of keys."""

    def __init__(self, context: KeyStoreContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.cut = {hashlib.sha256(digest).digest(): digest for digest in self.digests}

    @staticmethod
    def make_conformance_store(folder: Path, keys: dict[str, bool]) -> tuple[KeyStoreContext, Any]:
        return KeyStoreContext(), {hashlib.sha256(key.encode()[:1024]).digest(): may for key, may in keys.items()}

    def digest(self, key: bytes) -> bytes:
        return super().digest(key[:1024])


@mutant
class AcceptsWhatFollows(Digests):
    """Compares the first 72 bytes of keys that are longer, as bcrypt does."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        return await super().find_holder(key) or await super().find_holder(key[:72])
