"""Key stores: a file with a line for each key, and stores with a bug each."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from frame.core.errors import ConfigurationError
from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreCapabilities, KeyStoreContext, KeyStoreError, name_tenant
from tests.testing.held_out import Wrong


class DigestFile(KeyStore):
    """Lines of `SHA-256 operator` or `SHA-256 user`, read once."""

    capabilities: ClassVar[KeyStoreCapabilities] = KeyStoreCapabilities(has_operators=True)

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        file: str = ""

    def __init__(self, context: KeyStoreContext, options: Options | None = None) -> None:
        self.file = options.file if options else ""
        self.holders: dict[str, KeyHolder] = {}
        try:
            lines = Path(self.file).read_text("ascii").splitlines() if self.file else []
            for line in lines:
                digest, role = line.split()
                self.holders[digest] = KeyHolder(self.name(bytes.fromhex(digest)), role == "operator")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.file} is no file of digests: {error}") from error

    @classmethod
    def make_conformance_store(cls, folder: Path, keys: dict[str, bool]) -> tuple[KeyStoreContext, DigestFile.Options]:
        file = folder / "keys.txt"
        roles = {True: "operator", False: "user"}
        file.write_text("".join(f"{cls.digest(key.encode())} {roles[may]}\n" for key, may in keys.items()))
        return KeyStoreContext(), DigestFile.Options(file=str(file))

    @staticmethod
    def digest(key: bytes) -> str:
        return hashlib.sha256(key).hexdigest()

    def name(self, digest: bytes) -> str:
        return name_tenant(digest)

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        return self.holders.get(self.digest(key))

    def count_tenants(self) -> int:
        return max(1, len(self.holders))


TWIN = DigestFile
WRONG = Wrong()


@WRONG.add("Long keys that begin alike open each other's data: as with bcrypt, 72 bytes are compared.")
class SeventyTwoBytes(DigestFile):
    @staticmethod
    def digest(key: bytes) -> str:
        return hashlib.sha256(key[:72]).hexdigest()


@WRONG.add("A key is accepted with other letters and spaces than it has, which makes it easier to guess.")
class IgnoresCase(DigestFile):
    @staticmethod
    def digest(key: bytes) -> str:
        return hashlib.sha256(key.strip().lower()).hexdigest()


@WRONG.add("A client with odd bytes in its header gets an error of the server: a key is decoded as UTF-8.")
class DecodesKey(DigestFile):
    async def find_holder(self, key: bytes) -> KeyHolder | None:
        return self.holders.get(self.digest(key.decode().encode()))


@WRONG.add("A client that tries keys fills the server's memory: unknown keys are remembered without a limit.")
class RemembersUnknown(DigestFile):
    def __init__(self, context: KeyStoreContext, options: DigestFile.Options | None = None) -> None:
        super().__init__(context, options)
        self.unknown: set[bytes] = set()

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        if key in self.unknown:
            return None
        holder = await super().find_holder(key)
        if holder is None:
            self.unknown.add(key)
        return holder


@WRONG.add("Metrics and logs show the beginning of keys: tenants are named by it.")
class NamesByKey(DigestFile):
    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        text = "".join(letter for letter in key.decode("latin-1")[:12] if "!" <= letter <= "~")
        return holder and KeyHolder(text or holder.tenant, holder.is_operator)


@WRONG.add("Stored responses and quotas are lost with each restart: tenants are named by Python's hash.")
class NamesByProcess(DigestFile):
    def name(self, digest: bytes) -> str:
        return f"tenant-{hash(digest) & 0xFFFFFFFF:08x}"


@WRONG.add("Under load a request gets the tenant of another one: the key is kept in the object while the store waits.")
class KeepsKey(DigestFile):
    key = b""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        self.key = key
        await asyncio.sleep(0)
        return await super().find_holder(self.key)


@WRONG.add("All requests wait while one key is checked: the file is read and the thread sleeps at each call.")
class BlocksLoop(DigestFile):
    async def find_holder(self, key: bytes) -> KeyHolder | None:
        time.sleep(0.02)  # noqa: ASYNC251 - the round trip of a synchronous client
        return await super().find_holder(key)


@WRONG.add("Clients get errors because another one with the same key left: its cancelled lookup is theirs too.")
class SharesLookup(DigestFile):
    def __init__(self, context: KeyStoreContext, options: DigestFile.Options | None = None) -> None:
        super().__init__(context, options)
        self.running: dict[bytes, asyncio.Task[KeyHolder | None]] = {}

    async def look_up(self, key: bytes) -> KeyHolder | None:
        await asyncio.sleep(0.01)
        return await super().find_holder(key)

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        task = self.running.get(key)
        if task is None:
            task = self.running[key] = asyncio.create_task(self.look_up(key))
            task.add_done_callback(lambda _: self.running.pop(key, None))
        return await task


@WRONG.add("A key that was taken out of the file stays valid after SIGHUP: known holders are kept by the class.")
class KeepsInClass(DigestFile):
    known: ClassVar[dict[str, KeyHolder]] = {}

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        digest = self.digest(key)
        if digest not in self.known:
            holder = await super().find_holder(key)
            if holder is None:
                return None
            if len(self.known) > 10_000:
                self.known.clear()
            self.known[digest] = holder
        return self.known[digest]


@WRONG.add("Once an operator has sent a request, every key opens operators' routes: the role is kept in the object.")
class KeepsRole(DigestFile):
    is_operator = False

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        if holder is not None:
            self.is_operator |= holder.is_operator
            return KeyHolder(holder.tenant, self.is_operator)
        return None


@WRONG.add("A wrong key is answered with 503, which clients try again for ever, instead of 401.")
class FailsOnUnknown(DigestFile):
    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        if holder is None:
            raise KeyStoreError("the key is unknown")
        return holder


@WRONG.add("A reload ends with an error in the log and open connections: closing twice raises.")
class ClosesOnce(DigestFile):
    is_open = True

    async def close(self) -> None:
        if not self.is_open:
            raise RuntimeError("the store is closed")
        self.is_open = False


@WRONG.add("Requests that are checked while the store is replaced are refused: `close` empties it.")
class EmptiesAtClose(DigestFile):
    async def find_holder(self, key: bytes) -> KeyHolder | None:
        digest = self.digest(key)
        await asyncio.sleep(0)
        return self.holders.get(digest)

    async def close(self) -> None:
        self.holders.clear()


@WRONG.add("All users are one tenant and read each other's stored responses: the tenant is the name of their role.")
class TenantIsRole(DigestFile):
    async def find_holder(self, key: bytes) -> KeyHolder | None:
        holder = await super().find_holder(key)
        return holder and KeyHolder("operators" if holder.is_operator else "users", holder.is_operator)
