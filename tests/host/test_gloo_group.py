"""Groups of gloo on a known address."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from torch import distributed

from frame.host.gloo_group import find_own_address, make_gloo_group


def test_the_own_address_is_that_of_the_route() -> None:
    assert find_own_address("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(OSError):
        find_own_address("no-such-host.invalid", 80)


def test_two_members_broadcast() -> None:
    limit = timedelta(seconds=20)
    store = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
    received = torch.zeros(3)

    def join() -> None:
        other = distributed.TCPStore("127.0.0.1", store.port, 2, is_master=False, timeout=limit)
        make_gloo_group(other, 1, 2, limit, "127.0.0.1").broadcast([received], distributed.BroadcastOptions()).wait()

    thread = threading.Thread(target=join)
    thread.start()
    make_gloo_group(store, 0, 2, limit, "127.0.0.1").broadcast([torch.arange(3.0)], distributed.BroadcastOptions()).wait()
    thread.join()
    assert received.tolist() == [0, 1, 2]
