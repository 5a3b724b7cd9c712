"""The transfer `group` and trainers that are stopped: the system still accepts connections for
them. tests/testing/test_conformance_weight_transfer.py has the rest."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import distributed

from frame.core.interfaces.weight_transfer import TransferError
from frame.interfaces.weight_transfer import WeightTransferContext
from frame.plugins.weight_transfers.group import GroupInfo, GroupTransfer, await_trainer

PATIENCE = 20.0


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def open_group(port: int, timeout: float, errors: list[str]) -> tuple[GroupTransfer, threading.Thread]:
    """A transfer whose `open` waits in a thread."""
    transfer = GroupTransfer(WeightTransferContext(torch.device("cpu"), timeout=timeout))

    def work() -> None:
        try:
            transfer.open({"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"})
        except TransferError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return transfer, thread


def test_a_trainer_that_accepts_and_is_silent_ends_in_time(silent_port: int) -> None:
    errors: list[str] = []
    _, thread = open_group(silent_port, 0.5, errors)
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the thread waits in torch"
    assert "accepts connections and does not answer; let it continue or start it again, and call init_weights" in errors[0]


def test_a_silent_trainer_can_be_left(silent_port: int) -> None:
    errors: list[str] = []
    transfer, thread = open_group(silent_port, 600.0, errors)
    transfer.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert "it was left before" in errors[0]


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_of_torch_answers(use_libuv: bool) -> None:
    wait = timedelta(seconds=PATIENCE)
    store = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=wait, wait_for_workers=False, use_libuv=use_libuv)
    began = time.monotonic()
    await_trainer(GroupInfo("127.0.0.1", store.port, 1, 2), PATIENCE, threading.Event())
    assert time.monotonic() < began + PATIENCE / 2
    store.set("key", "value")
    assert store.get("key") == b"value", "and serves on"
