"""Flags of SGLang and vLLM for KV cache tiers and KV events, read as settings of the section
`cache` and options of its plugins.

Used by the sources of settings and by the command line. Must not know other settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from frame.core.errors import ConfigError, did_you_mean

ENABLE, SIZE, RATIO, STORAGE = "enable-hierarchical-cache", "hicache-size", "hicache-ratio", "hicache-storage-backend"
OFFLOADING = "kv-offloading-size"
EVENTS = "kv-events-config"
TIERS = "cache-tiers"
FILE = "file"

# flag -> (placeholder of its value, None: it has none; help)
TIER_FLAGS: Mapping[str, tuple[str | None, str]] = MappingProxyType(
    {
        ENABLE: (None, "Keep cached prefixes in host memory too (cache.tiers: [host])."),
        SIZE: ("GIB", "GiB of the tier host (plugins.options.kv_tier/host.size_gib)."),
        RATIO: ("X", "Size of the tier host as a multiple of the device's KV cache (plugins.options.kv_tier/host.ratio)."),
        STORAGE: (FILE, "file: keep cached prefixes on disk too (cache.tiers: [host, disk])."),
        OFFLOADING: ("GIB", "Keep cached prefixes in so many GiB of host memory too (cache.tiers: [host] and its size_gib)."),
        EVENTS: ("JSON", "vLLM's object of KV events, with enable_kv_cache_events and endpoint (cache.events_endpoint and others)."),
    }
)
_EVENT_FLAGS = "cache-events-"
_EVENT_KEYS = ("endpoint", "replay_endpoint", "topic", "buffer_steps", "hwm", "max_queue_size")
_OPTIONS = ("plugins", "options", "kv_tier/host")

Path = tuple[str, ...]


def read_tier_flags(flags: Mapping[str, Any], kind: str) -> Iterator[tuple[Path, Any, str]]:
    """The settings that these flags stand for. flags: values by name, that of `TIERS` among them.
    kind: "flag --" or "keyword ", for the source of a value. Raises ConfigError where flags
    contradict each other."""
    values = {name: value for name, value in flags.items() if name in TIER_FLAGS and value not in (None, False)}

    def name_of(flag: str) -> str:
        return f"{kind}{flag if kind.endswith('-') else flag.replace('-', '_')}"

    numbers = {flag: _positive(name_of(flag), values[flag]) for flag in (SIZE, RATIO, OFFLOADING) if flag in values}
    for first, second in ((SIZE, RATIO), (RATIO, OFFLOADING), (SIZE, OFFLOADING)):
        if first in numbers and second in numbers and (RATIO in (first, second) or numbers[first] != numbers[second]):
            raise ConfigError(f"{name_of(first)} and {name_of(second)} contradict each other; keep one.")
    if STORAGE in values and values[STORAGE] != FILE:
        raise ConfigError(f"{name_of(STORAGE)} is {values[STORAGE]!r}; it should be {FILE!r}, which is the tier disk.")
    yield from _read_events(values, [name for name in flags if name.startswith(_EVENT_FLAGS)], name_of)
    yield from _tiers(values, flags.get(TIERS), name_of)
    for flag, option in ((SIZE, "size_gib"), (OFFLOADING, "size_gib"), (RATIO, "ratio")):
        if flag in numbers and (flag != OFFLOADING or SIZE not in numbers):
            yield (*_OPTIONS, option), numbers[flag], name_of(flag)


def _tiers(values: Mapping[str, Any], explicit: Any, name_of: Any) -> Iterator[tuple[Path, Any, str]]:
    enabling = next((flag for flag in (ENABLE, OFFLOADING) if flag in values), None)
    implied = ["host"] if enabling else []
    if STORAGE in values:
        if enabling is None and explicit is None:
            raise ConfigError(
                f"{name_of(STORAGE)} needs {name_of(ENABLE)}; add it, or write {name_of(TIERS)} disk for a tier on disk alone."
            )
        implied.append("disk")
    if not implied:
        return
    source = name_of(enabling or STORAGE)
    if explicit is None:
        yield ("cache", "tiers"), implied, source
        return
    named = explicit.strip("[]").split(",") if isinstance(explicit, str) else explicit
    lacking = [tier for tier in implied if tier not in [str(name).strip() for name in named]]
    if lacking:
        raise ConfigError(
            f"{source} and {name_of(TIERS)} {','.join(map(str, named))} contradict each other: add {lacking[0]}, or keep one."
        )


def _read_events(values: Mapping[str, Any], others: Sequence[str], name_of: Any) -> Iterator[tuple[Path, Any, str]]:
    """The settings in vLLM's object. Without an endpoint it has vLLM's."""
    if EVENTS not in values:
        return
    source, sent = name_of(EVENTS), values[EVENTS]
    try:
        fields = json.loads(sent) if isinstance(sent, str) else sent
    except ValueError:
        fields = None
    if not isinstance(fields, Mapping):
        raise ConfigError(f'{source} is {sent!r}; it should be a JSON object such as {{"enable_kv_cache_events": true}}.')
    known = ("enable_kv_cache_events", "publisher", *_EVENT_KEYS)
    if unknown := [name for name in fields if name not in known]:
        raise ConfigError(f"{source} has the unknown key {unknown[0]!r}{did_you_mean(unknown[0], known) or '; it has ' + ', '.join(known)}")
    is_on, publisher = fields.get("enable_kv_cache_events", False), fields.get("publisher")
    if not isinstance(is_on, bool) or publisher not in (None, "null", "zmq"):
        raise ConfigError(f"{source}: enable_kv_cache_events should be true or false, and publisher zmq or null.")
    if others:
        raise ConfigError(f"{source} and {name_of(others[0])} contradict each other; keep one.")
    if is_on and publisher != "null":
        for name, value in ({"endpoint": "tcp://*:5557"} | dict(fields)).items():
            if name in _EVENT_KEYS and value is not None:
                yield ("cache", f"events_{name}"), value, source


def _positive(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise ConfigError(f"{name} is {value!r}; it should be a number greater than 0.")
    return number
