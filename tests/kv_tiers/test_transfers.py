"""Transfers of requests through the scheduler, with fake tiers: what a prefill server keeps, and
what a decode server expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from frame.core.interfaces.kv_tier import KVTransfer
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.request import Request
from frame.kv_tiers.loads import PrefixLoads, Wait
from tests.core.scheduling.small_rig import config, policy
from tests.kv_tiers.tier_rig import MemoryTier, TierRig

PROMPT = list(range(40, 66))  # 6 pages and a part
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
KEPT, EXPECTED = KVTransfer("lease", num_blocks=6), KVTransfer("lease", "host", 1, 6)


class TransferTier(MemoryTier):
    """Implements `SupportsTransfers` and `CountsRoom`. `peer`: the prefill server's tier. `room`:
    blocks that it has buffers for; None: for all."""

    def __init__(self, block_bytes: int, max_blocks: int = 1000, max_jobs: int = 100) -> None:
        super().__init__(block_bytes, max_blocks, max_jobs)
        self.peer: TransferTier | None = None
        self.open: dict[str, list[bytes]] = {}
        self.num_opened = 0
        self.tenants: list[str] = []
        self.num_received = self.num_asked = 0
        self.room: int | None = None

    def count_room(self, *, is_store: bool) -> int | None:
        self.num_asked += 1
        return self.room

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        assert self.room is None or len(keys) <= self.room, "it is asked in vain"
        return super().load(job, keys)

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        assert self.room is None or len(keys) <= self.room, "it is asked in vain"
        self.room = None if self.room is None else self.room - len(keys)
        return super().store(job, keys)

    def open_transfer(self, transfer: KVTransfer, keys: Sequence[bytes]) -> None:
        assert transfer.lease not in self.open
        assert len(keys) == transfer.num_blocks
        self.open[transfer.lease] = list(keys)
        self.tenants.append(transfer.tenant)
        self.num_opened += 1
        if self.peer is not None:
            for key, source in zip(keys, self.peer.open.pop(transfer.lease, ()), strict=False):
                if source in self.peer.blocks:
                    self.blocks[key] = self.peer.blocks[source]

    def close_transfer(self, lease: str) -> None:
        for key in self.open.pop(lease, ()):
            self.blocks.pop(key, None)

    def close_transfers(self) -> None:
        for lease in list(self.open):
            self.close_transfer(lease)

    @property
    def num_transfers(self) -> int:
        return len(self.open)

    def describe_transfers(self) -> dict[str, float]:
        return {"leases": len(self.open), "transfer_bytes": self.num_received}


class TransferRig(TierRig):
    tier_class = TransferTier

    @property
    def tier(self) -> TransferTier:
        (tier,) = self.tiers
        assert isinstance(tier, TransferTier)
        return tier


def make_prefill(transfer: KVTransfer = KEPT) -> TransferRig:
    """A prefill server that has computed the prompt."""
    rig = TransferRig(config(), policy())
    rid = rig.add(PROMPT, ONE, transfer=transfer)
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    rig.run_until(lambda: not rig.controller._stores)
    return rig


def make_decode(prefill: TransferRig) -> TransferRig:
    rig = TransferRig(config(), policy())
    rig.tier.peer = prefill.tier
    return rig


def test_the_blocks_of_a_prompt_are_kept() -> None:
    rig = make_prefill()
    assert list(rig.tier.open) == ["lease"]
    assert rig.tier.match(rig.tier.open["lease"]) == 6
    assert rig.controller.is_busy, "the tier is polled, so that the lease ends"
    assert rig.load["tiers"][0]["leases"] == 1
    rig.tier.close_transfer("lease")
    rig.run_until(lambda: rig.scheduler.is_idle)


def test_a_tier_knows_whose_prompt_it_keeps() -> None:
    rig = TransferRig(config(), policy())
    rid = rig.add(PROMPT, ONE, transfer=KEPT, namespace="tenant:salt")
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    assert rig.tier.tenants == ["tenant"]


def test_a_prompt_is_kept_when_all_of_it_is_computed() -> None:
    """A prompt of several chunks is offered with each of them."""
    rig = TransferRig(config(token_budget=8), policy())
    rid = rig.add(PROMPT, PARAMS, transfer=KEPT)
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    assert rig.tier.num_opened == 1
    assert len(rig.tier.open["lease"]) == 6


def test_leading_blocks_are_kept_where_there_is_no_room_for_all() -> None:
    """The decode server computes the rest."""
    prefill = TransferRig(config(), policy())
    prefill.tier.room = 4
    prefill.add(PROMPT, ONE, transfer=KEPT)
    prefill.run_until(lambda: bool(prefill.tier.open) and not prefill.controller._stores)
    assert prefill.tier.match(prefill.tier.open["lease"]) == 4
    assert prefill.load["tier_dropped_blocks"] == 2
    decode = make_decode(prefill)
    rid = decode.add(PROMPT, PARAMS, transfer=EXPECTED)
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert decode.requests[rid].cached == 16
    decode.run()


def test_blocks_that_found_no_room_are_stored_with_later_ones() -> None:
    """Tokens of the output complete another page."""
    rig = TransferRig(config(), policy())
    rig.tier.room = 1
    rid = rig.add(PROMPT, PARAMS, transfer=KEPT)
    rig.run_until(lambda: rig.tier.num_opened > 0)
    rig.tier.room = 100
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    rig.run_until(lambda: not rig.controller._stores)
    assert rig.tier.match(rig.tier.open["lease"]) == 6


def test_the_prompt_is_read_from_the_peer() -> None:
    decode = make_decode(make_prefill())
    rid = decode.add([*PROMPT], PARAMS, transfer=EXPECTED)
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert decode.requests[rid].cached == 24
    assert decode.load["tiers"][0]["loaded_tokens"] == 24
    decode.run_until(lambda: decode.scheduler.is_idle)
    assert not decode.tier.open
    decode.run()


def test_the_first_token_is_continued() -> None:
    """`Generate` with one token of output, as a request is recovered."""
    prefill = make_prefill()
    (first,) = next(iter(prefill.requests.values())).got
    decode = make_decode(prefill)
    rid = decode.add([*PROMPT, first], PARAMS, transfer=EXPECTED)
    assert len(decode.requests) == 1
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert decode.load["tiers"][0]["loaded_tokens"] == 24
    decode.run()


def test_a_transfer_that_fails_is_computed() -> None:
    prefill = make_prefill()
    prefill.tier.open.clear()  # the lease has expired
    decode = make_decode(prefill)
    rid = decode.add(PROMPT, PARAMS, transfer=EXPECTED)
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert decode.requests[rid].cached == 0
    assert decode.tier.num_opened == 1
    decode.run()
    assert not decode.tier.open


def test_a_peer_with_smaller_pages_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its blocks are more than the prompt has here, so it is not asked for them."""
    rig = TransferRig(config(), policy())
    for _ in range(2):
        rid = rig.add(PROMPT, PARAMS, transfer=KVTransfer("lease", "host", 1, 13))
        rig.run_until(lambda rid=rid: rig.requests[rid].finish is not None)
        rig.drop_device_cache()
    rig.run()
    assert rig.tier.num_opened == 0
    (record,) = [each for each in caplog.records if each.name == "frame.kv_tiers.transfers"]
    assert "a prefill server has 13 blocks of a prompt of 6 blocks of 4 tokens" in record.getMessage()


def test_a_load_is_waited_for_while_blocks_arrive() -> None:
    """Those of other prompts: transfers queue. The wait is bounded; without progress it ends."""
    prefill = make_prefill()
    for progress, expected in (((1, 1), 24), ((1, 0), 0), ((1,) * 9, 0)):
        decode = make_decode(prefill)
        prefill.tier.open["lease"] = list(prefill.tier.blocks)[:6]
        decode.tier.is_held = True
        rid = decode.add(PROMPT, PARAMS, transfer=EXPECTED)
        decode.step()
        for count in progress:
            decode.now += 1.5
            decode.tier.num_received += count
            decode.step()
        decode.tier.is_held = False
        decode.run_until(lambda decode=decode, rid=rid: decode.requests[rid].finish is not None)  # type: ignore[misc]
        assert (decode.requests[rid].cached, decode.load["tier_late_loads"]) == (expected, expected == 0)
        decode.run()


@pytest.mark.parametrize("tells", [True, False])
def test_transfers_without_room_wait_in_turn(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is no room, a step tries the first request alone, and none where the tier tells
    that there is none; no page is taken."""
    decode, looked_up, num_requests = TransferRig(config(), policy()), list[str](), 40
    look_up = PrefixLoads._look_up

    def count_look_up(self: PrefixLoads, request: Request, wait: Wait) -> None:
        looked_up.append(request.rid)
        look_up(self, request, wait)

    monkeypatch.setattr(PrefixLoads, "_look_up", count_look_up)
    if tells:
        decode.tier.room = 5
    else:
        decode.tier.max_jobs = 0
    prompts = [[number, *PROMPT[1:]] for number in range(num_requests)]
    transfers = [KVTransfer(f"{number}", "host", 1, 6) for number in range(num_requests)]
    prefill = TransferRig(config(), policy())
    for prompt, transfer in zip(prompts, transfers, strict=True):
        prefill.add(prompt, ONE, transfer=KVTransfer(transfer.lease, num_blocks=6))
    prefill.run_until(lambda: len(prefill.tier.open) == num_requests and not prefill.controller._stores, 1000)
    decode.tier.peer = prefill.tier
    looked_up.clear()
    rids = [decode.add(prompt, PARAMS, transfer=transfer) for prompt, transfer in zip(prompts, transfers, strict=True)]
    decode.step()
    assert sorted(looked_up) == sorted(rids), "each is looked up once, for its deadline"
    looked_up.clear()
    decode.tier.num_asked = 0
    for _ in range(10):
        decode.now += 0.02
        decode.step()
    assert len(looked_up) <= (0 if tells else 20)
    assert set(looked_up) <= {rids[0]}
    assert decode.tier.num_asked <= 20
    decode.tier.room, decode.tier.max_jobs = None, 100
    decode.run_until(lambda: all(decode.requests[rid].finish is not None for rid in rids), 2000)
    assert all(decode.requests[rid].cached == 24 for rid in rids)
    assert decode.load["tier_late_loads"] == 0
    decode.run()


def test_a_prompt_without_room_joins_the_load_of_another() -> None:
    """The room is for one; the second request needs none."""
    decode = make_decode(make_prefill())
    decode.tier.room = 5
    rids = [decode.add(PROMPT, PARAMS, transfer=KVTransfer(lease, "host", 1, 6)) for lease in ("lease", "second")]
    decode.step()
    load = decode.tier.load

    def load_all(job: int, keys: Sequence[bytes]) -> Any:
        buffers, decode.tier.room = load(job, keys), 0
        return buffers

    decode.tier.load = load_all  # type: ignore[method-assign]
    decode.tier.room, decode.tier.is_held = 6, True
    decode.step()
    assert decode.controller._loads.num_waiting == 2
    decode.tier.is_held = False
    decode.run_until(lambda: all(decode.requests[rid].finish is not None for rid in rids))
    assert [decode.requests[rid].cached for rid in rids] == [24, 24]
    decode.run()


def test_a_transfer_that_finds_no_room_is_counted_and_computed() -> None:
    decode = make_decode(make_prefill())
    decode.tier.max_jobs = 0
    rid = decode.add(PROMPT, PARAMS, transfer=EXPECTED)
    decode.step()
    decode.now += 60
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert (decode.requests[rid].cached, decode.load["tier_late_loads"]) == (0, 1)
    decode.run()


def test_an_abort_closes_the_transfer() -> None:
    decode = make_decode(make_prefill())
    decode.tier.is_held = True
    rid = decode.add(PROMPT, PARAMS, transfer=EXPECTED)
    decode.step()
    assert decode.tier.loads
    decode.abort(rid)
    decode.run_until(lambda: decode.scheduler.is_idle)
    assert not decode.tier.open
    assert not decode.tier.loads
    decode.run()


def test_a_flush_closes_all_transfers() -> None:
    """The weights may have changed: a request that arrived before expects nothing any more."""
    prefill = make_prefill()
    decode = make_decode(prefill)
    decode.tier.is_held = True
    rid = decode.add(PROMPT, PARAMS, transfer=EXPECTED)
    decode.step()
    decode.scheduler.flush_cache()
    decode.tier.is_held = False
    assert not decode.tier.open
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert (decode.requests[rid].cached, decode.tier.num_opened) == (0, 1)
    decode.run()
    again = make_prefill()
    again.scheduler.flush_cache()
    assert not again.tier.open


def test_requests_without_transfers_are_served_as_before() -> None:
    decode = make_decode(make_prefill())
    rid = decode.add(PROMPT, PARAMS)
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert decode.tier.num_opened == 0
    decode.run()


def test_a_server_without_such_a_tier_computes() -> None:
    rig = TierRig(config(), policy())
    for transfer in (KEPT, EXPECTED):
        rid = rig.add(PROMPT, PARAMS, transfer=transfer)
        rig.run_until(lambda rid=rid: rig.requests[rid].finish is not None)  # type: ignore[misc]
    rig.run()
