"""A key store: teams with several keys each, in a JSON file that is read again when it changes."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from frame.core.errors import ConfigurationError
from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreCapabilities, KeyStoreContext, KeyStoreError, name_tenant
from frame.registration import KindRegistry, hookimpl

CHECK = 0.1  # seconds between two looks at the file's time


class Team(BaseModel):
    """`digests`: SHA-256 of its keys, in hexadecimal."""

    digests: tuple[str, ...]
    operator: bool = False


class Options(BaseModel):
    """`file`: an object of teams by name, `{"red": {"digests": ["…"], "operator": false}}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str = ""


class TeamKeys(KeyStore):
    """Each team is a tenant, whichever of its keys it sends."""

    def __init__(self, context: KeyStoreContext, options: Options) -> None:
        super().__init__(context, options)
        self._file, self._checked, self._time = Path(options.file), 0.0, 0
        try:
            self._read()
        except KeyStoreError as error:
            raise ConfigurationError(f"key_store/team.file: {error}") from error

    @staticmethod
    def make_conformance_store(folder: Path, keys: dict[str, bool]) -> tuple[KeyStoreContext, Options]:
        file, teams = folder / "teams.json", {}
        for number, (key, may) in enumerate(keys.items()):
            teams[f"team {number}"] = {"digests": [hashlib.sha256(key.encode()).hexdigest()], "operator": may}
        file.write_text(json.dumps(teams))
        return KeyStoreContext(), Options(file=str(file))

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        if time.monotonic() > self._checked + CHECK:
            self._read()
        return self._holders.get(hashlib.sha256(key).hexdigest())

    def count_tenants(self) -> int:
        return max(2, len(set(self._holders.values())))

    def _read(self) -> None:
        """Read the file if it has changed. Raises KeyStoreError."""
        try:
            changed = self._file.stat().st_mtime_ns
            if changed != self._time:
                teams = TypeAdapter(dict[str, Team]).validate_json(self._file.read_bytes())
                holders = {name: KeyHolder(name_tenant(name.encode()), team.operator) for name, team in teams.items()}
                self._holders = {digest: holders[name] for name, team in teams.items() for digest in team.digests}
                self._time = changed
        except (OSError, ValidationError) as error:
            raise KeyStoreError(f"{self._file} cannot be read: {error}") from error
        self._checked = time.monotonic()


@hookimpl
def register_key_stores(registry: KindRegistry) -> None:
    """Add `team`."""
    can = KeyStoreCapabilities(has_operators=True)
    registry.add("team", TeamKeys, capabilities=can, options=Options, api="key_store/1", summary="Keys of teams in a JSON file.")
