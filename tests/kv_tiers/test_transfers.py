"""Transfers of requests through the scheduler, with fake tiers: what a prefill server keeps, and
what a decode server expects."""

from __future__ import annotations

from collections.abc import Sequence

from frame.core.interfaces.kv_tier import KVTransfer
from frame.core.interfaces.sampling_params import SamplingParams
from frame.kv_tiers.loads import RETRY_SECONDS
from tests.core.scheduling.small_rig import config, policy
from tests.kv_tiers.tier_rig import MemoryTier, TierRig

PROMPT = list(range(40, 66))  # 6 pages and a part
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
KEPT, EXPECTED = KVTransfer("lease", num_blocks=6), KVTransfer("lease", "host", 1, 6)


class TransferTier(MemoryTier):
    """Implements `SupportsTransfers`. `peer`: the prefill server's tier. `is_full`: it takes no
    transfer."""

    def __init__(self, block_bytes: int, max_blocks: int = 1000, max_jobs: int = 100) -> None:
        super().__init__(block_bytes, max_blocks, max_jobs)
        self.peer: TransferTier | None = None
        self.open: dict[str, list[bytes]] = {}
        self.num_opened = 0
        self.num_received = 0

    def open_transfer(self, transfer: KVTransfer, keys: Sequence[bytes]) -> None:
        assert transfer.lease not in self.open
        assert len(keys) == transfer.num_blocks
        self.open[transfer.lease] = list(keys)
        self.num_opened += 1
        if self.peer is not None:
            for key, source in zip(keys, self.peer.open.pop(transfer.lease, ()), strict=False):
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


def test_a_prompt_is_kept_when_all_of_it_is_computed() -> None:
    """A prompt of several chunks is offered with each of them."""
    rig = TransferRig(config(token_budget=8), policy())
    rid = rig.add(PROMPT, PARAMS, transfer=KEPT)
    rig.run_until(lambda: rig.requests[rid].finish is not None)
    assert rig.tier.num_opened == 1
    assert len(rig.tier.open["lease"]) == 6


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


def test_a_transfer_without_room_is_tried_again() -> None:
    decode = make_decode(make_prefill())
    decode.tier.max_jobs = 0
    rid = decode.add(PROMPT, PARAMS, transfer=EXPECTED)
    for _ in range(3):
        decode.step()
    decode.tier.max_jobs = 100
    decode.step()
    assert decode.requests[rid].finish is None and not decode.tier.loads, "not within 10 ms"
    decode.now += RETRY_SECONDS
    decode.run_until(lambda: decode.requests[rid].finish is not None)
    assert (decode.requests[rid].cached, decode.load["tier_late_loads"]) == (24, 0)
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
