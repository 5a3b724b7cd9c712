"""The keys of blocks: chained, keyed, incremental, bounded."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.request import Request, RequestStatus
from frame.kv_tiers.block_keys import BlockKeys, RequestKeys

TOKENS = np.arange(40, dtype=np.int32)


def make_request(rid: str = "one", namespace: str = "") -> Request:
    return Request(rid, TOKENS, SamplingParams(), 0, 0, 0.0, 1.0, 100, namespace=namespace)


def keys_of(tokens: np.ndarray, size: int = 4, root: bytes = b"root") -> BlockKeys:
    chain = BlockKeys(root, size)
    chain.extend(tokens)
    return chain


@pytest.mark.parametrize("size", [1, 4, 16])
def test_chain_extends_as_if_hashed_at_once(size: int) -> None:
    chain = BlockKeys(b"root", size)
    added = [chain.extend(TOKENS[:length]) for length in (3, 9, 9, 33, 40)]
    assert sum(added) == 40 // size == len(chain.keys)
    assert chain.keys == keys_of(TOKENS, size).keys
    assert all(len(key) == 32 for key in chain.keys)
    assert len(set(chain.keys)) == len(chain.keys)


def test_chain_grows_by_at_most_the_limit() -> None:
    chain = BlockKeys(b"root", 4)
    assert [chain.extend(TOKENS, 4) for _ in range(4)] == [4, 4, 2, 0]
    assert chain.keys == keys_of(TOKENS).keys


def test_key_depends_on_all_tokens_before_it() -> None:
    other = TOKENS.copy()
    other[5] += 1
    first, second = keys_of(TOKENS).keys, keys_of(other).keys
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_dtype_does_not_change_keys() -> None:
    assert keys_of(TOKENS.astype(np.int64)).keys == keys_of(TOKENS).keys


@pytest.mark.parametrize(("place", "expected"), [(None, 10), (0, 0), (3, 0), (4, 1), (22, 5), (39, 9)])
def test_blocks_before_a_negative_key_are_public(place: int | None, expected: int) -> None:
    tokens = TOKENS.copy()
    if place is not None:
        tokens[place:] = -7
    assert keys_of(tokens).num_public == expected
    chain = BlockKeys(b"root", 4)
    for length in range(1, 41, 3):
        chain.extend(tokens[:length])
        assert chain.num_public == min(expected, length // 4)


def test_roots_differ_by_secret_identity_namespace_and_generation() -> None:
    keys = RequestKeys(b"secret", "model", 4)
    others = [
        RequestKeys(b"other", "model", 4).make_root(""),
        RequestKeys(b"secret", "modelx", 4).make_root(""),
        RequestKeys(b"secret", "mode", 4).make_root("l"),
        keys.make_root("tenant:"),
    ]
    before = keys.make_root("")
    assert before == RequestKeys(b"secret", "model", 4).make_root("")
    keys.renew_roots()
    others += [before, keys.make_root("")]
    again = RequestKeys(b"secret", "model", 4)
    again.renew_roots()
    others.append(again.make_root(""))  # another run that flushed as often
    assert len(set(others)) == len(others)


def test_chains_are_kept_until_requests_end() -> None:
    keys, request = RequestKeys(b"secret", "model", 4), make_request()
    chain = keys.extend(request, TOKENS[:20])
    request.state = RequestStatus.RUNNING
    keys.forget(request)
    assert keys.extend(request, TOKENS) is chain
    request.state = RequestStatus.FINISHED
    keys.forget(request)
    assert keys.extend(request, TOKENS) is not chain


def test_chains_are_bounded() -> None:
    keys = RequestKeys(b"secret", "model", 4, max_blocks=20)
    first = keys.extend(make_request("0"), TOKENS)
    for number in range(1, 6):
        keys.extend(make_request(str(number)), TOKENS)
        assert sum(len(chain.keys) for chain in keys._chains.values()) == keys._num_blocks <= 20
    again = keys.extend(make_request("0"), TOKENS)
    assert again is not first
    assert again.keys == first.keys
