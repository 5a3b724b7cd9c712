"""In-tree tiers in small sizes, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

from frame.plugins.loader import load_registry
from frame.testing.conformance import Setting, Subject, find
from frame.testing.kv_tier.rig import Rig

REGISTRY = load_registry(installed=False)


def subject(name: str) -> Subject:
    return find(REGISTRY, f"kv_tier:{name}", Setting())


def make_disk(folder: Path, num_blocks: int = 16, identity: str = "model", block_bytes: int = 4096) -> Rig:
    """A disk tier; earlier blocks are in its index when it has polled for them."""
    return Rig(subject("disk"), folder, num_blocks, block_bytes, identity)


def wait_for_index(rig: Rig, keys: list[bytes], count: int) -> None:
    rig.wait_until(lambda: rig.count_held(keys) == count, f"{count} blocks are not held")
