"""What a key holds of what it may have: opened, widened, given back, refused."""

from __future__ import annotations

import asyncio

import pytest

from frame.entrypoints.engine_client.quotas import Places, QuotaExceededError, TenantQuotas


def test_places_are_counted_and_come_back() -> None:
    shares = TenantQuotas(4)
    with shares.open("a") as first, shares.open("b"):
        first.widen(1)
        first.widen(3)
        with shares.open("a") as second:
            with pytest.raises(QuotaExceededError, match="^3 requests of this key are running or waiting, and it may have 4") as full:
                second.widen(2)
            assert not full.value.is_hopeless
            with pytest.raises(QuotaExceededError), shares.open("a"):
                pass
        second.close()  # twice is once
        with shares.open("a"):
            pass
    with shares.open("a") as whole:
        with pytest.raises(QuotaExceededError, match="asks for 5 sequences, and a key may have 4 at once") as never:
            whole.widen(5)
        assert never.value.is_hopeless
        whole.widen(4)


def test_what_goes_on_keeps_its_places() -> None:
    shares = TenantQuotas(2)
    with shares.open("a") as share:
        share.widen(2)
        later = share.handed_on()
    with pytest.raises(QuotaExceededError), shares.open("a"):
        pass
    later.close()
    with shares.open("a"):
        pass


def test_without_a_limit_or_a_key_all_may_be_had() -> None:
    for shares, tenant in ((TenantQuotas(None), "a"), (TenantQuotas(1), "")):
        with shares.open(tenant) as share, shares.open(tenant):
            share.widen(1000)


async def test_tenants_take_turns() -> None:
    places, order, gate = Places(2), [], asyncio.Event()

    async def work(tenant: str) -> None:
        async with places.hold(tenant):
            order.append(tenant)
            await gate.wait()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        many = [group.create_task(work("many")) for _ in range(20)]
        await asyncio.sleep(0)
        for _ in range(3):
            group.create_task(work("few"))
        await asyncio.sleep(0)
        for task in many[2:6]:  # some of those that wait are given up
            task.cancel()
        await asyncio.sleep(0)
        gate.set()
    assert order[:2] == ["many", "many"]
    assert order[2:8].count("few") == 3
    assert len(order) == 19


async def test_a_place_that_comes_with_a_cancellation_is_passed_on() -> None:
    places, held = Places(1), []

    async def work(name: str) -> None:
        async with places.hold(name):
            held.append(name)

    first = places.hold("a")
    await first.__aenter__()
    waiting, last = asyncio.create_task(work("b")), asyncio.create_task(work("c"))
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)
    waiting.cancel()  # it has its place and has not run yet
    await asyncio.wait_for(last, 10)
    assert held == ["c"]


def test_a_key_holds_a_part_of_the_places_alone() -> None:
    shares = TenantQuotas(None, 8)
    with shares.open("a") as first, shares.open("a") as second, shares.open("b") as other:
        first.widen(6, counts=False)
        with pytest.raises(QuotaExceededError, match="6 sequences of this key") as refused:
            second.widen(3, counts=False)
        assert not refused.value.is_hopeless
        other.widen(8)
        second.widen(2)
        with pytest.raises(QuotaExceededError, match="asks for 9") as refused:
            other.handed_on().widen(17)
        assert refused.value.is_hopeless
    with shares.open("a") as again:
        again.widen(8)
