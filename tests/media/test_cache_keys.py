"""Cache keys of placeholders: negative, odd, never used twice; those of adapters are even."""

from __future__ import annotations

import numpy as np

from frame.adapters.places import AdapterVersions
from frame.media.cache_keys import ItemKeys, name_item
from tests.media.media_rig import make_item


def test_keys_are_negative_odd_and_of_one_item() -> None:
    keys = ItemKeys()
    names = [name_item(tenant, make_item(name)) for tenant in ("", "a") for name in ("x", "y")]
    names.append(name_item("", make_item("x", modality="video")))
    first = [keys.find_key(name) for name in names]
    assert first == [keys.find_key(name) for name in names]
    assert len(set(first)) == len(names)
    assert all(key < -1 and key % 2 for key in first)


def test_a_forgotten_item_gets_another_key() -> None:
    keys = ItemKeys(max_items=2)
    first, second = (keys.find_key(("", "image", name)) for name in (b"1", b"2"))
    assert keys.find_key(("", "image", b"1")) == first
    third = keys.find_key(("", "image", b"3"))  # the second one is forgotten
    assert keys.find_key(("", "image", b"1")) == first
    assert keys.find_key(("", "image", b"2")) not in (first, second, third)


def test_keys_of_adapters_are_even_and_depend_on_the_placeholder() -> None:
    versions = AdapterVersions()
    versions.add_version("x", 1, (), 0.0)
    keys = [versions.find_key(versions.by_digest["x"], token) for token in (7, -3, -5)]
    assert len(set(keys)) == 3
    assert all(key < 0 and key % 2 == 0 for key in keys)
    assert np.array(keys, np.int32).tolist() == keys
