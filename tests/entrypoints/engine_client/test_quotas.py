"""Leases of tenants' quotas: opened, grown, given back, refused; the fair semaphore."""

from __future__ import annotations

import asyncio

import pytest

from frame.entrypoints.engine_client.quotas import FairSemaphore, LoopTurns, PlaceShares, QuotaExceededError, TenantQuotas


def test_requests_are_counted_and_given_back() -> None:
    quotas = TenantQuotas(4)
    with quotas.open_lease("a") as first, quotas.open_lease("b"):
        first.reserve_sequences(1)
        first.reserve_sequences(3)
        with quotas.open_lease("a") as second:
            with pytest.raises(QuotaExceededError, match="^3 requests of this key are running or waiting, and it may have 4") as full:
                second.reserve_sequences(2)
            assert not full.value.is_permanent
            with pytest.raises(QuotaExceededError), quotas.open_lease("a"):
                pass
        second.close()  # a second call does nothing
        with quotas.open_lease("a"):
            pass
    with quotas.open_lease("a") as whole:
        with pytest.raises(QuotaExceededError, match="asks for 5 sequences, and a key may have 4 at once") as never:
            whole.reserve_sequences(5)
        assert never.value.is_permanent
        whole.reserve_sequences(4)


def test_a_transferred_lease_outlives_its_request() -> None:
    quotas = TenantQuotas(2)
    with quotas.open_lease("a") as lease:
        lease.reserve_sequences(2)
        later = lease.transfer()
    with pytest.raises(QuotaExceededError), quotas.open_lease("a"):
        pass
    later.close()
    with quotas.open_lease("a"):
        pass


def test_without_a_limit_or_a_key_nothing_is_refused() -> None:
    for quotas, tenant in ((TenantQuotas(None), "a"), (TenantQuotas(1), "")):
        with quotas.open_lease(tenant) as lease, quotas.open_lease(tenant):
            lease.reserve_sequences(1000)


async def test_tenants_take_turns() -> None:
    slots, order, gate = FairSemaphore(2), [], asyncio.Event()

    async def work(tenant: str) -> None:
        async with slots.hold_slot(tenant):
            order.append(tenant)
            await gate.wait()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        many = [group.create_task(work("many")) for _ in range(20)]
        await asyncio.sleep(0)
        for _ in range(3):
            group.create_task(work("few"))
        await asyncio.sleep(0)
        for task in many[2:6]:  # some waiters are cancelled
            task.cancel()
        await asyncio.sleep(0)
        gate.set()
    assert order[:2] == ["many", "many"]
    assert order[2:8].count("few") == 3
    assert len(order) == 19


async def test_a_slot_granted_to_a_cancelled_waiter_is_passed_on() -> None:
    slots, held = FairSemaphore(1), []

    async def work(name: str) -> None:
        async with slots.hold_slot(name):
            held.append(name)

    first = slots.hold_slot("a")
    await first.__aenter__()
    waiting, last = asyncio.create_task(work("b")), asyncio.create_task(work("c"))
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)
    waiting.cancel()  # it was granted the slot and has not run yet
    await asyncio.wait_for(last, 10)
    assert held == ["c"]


async def test_passes_of_the_event_loop_have_a_bounded_part_of_the_work() -> None:
    turns, passes, work = LoopTurns(10), [0], list[tuple[int, str, int]]()

    async def count_passes() -> None:
        while True:
            passes[0] += 1
            await asyncio.sleep(0)

    async def do(tenant: str, size: int) -> None:
        await turns.take_turn(tenant, size)
        work.append((passes[0], tenant, size))

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        counter = group.create_task(count_passes())
        tasks = [group.create_task(do("many", 4)) for _ in range(40)]
        tasks += [group.create_task(do("many", 100)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks[5:25]:
            task.cancel()
        tasks += [group.create_task(do("few", 4)) for _ in range(3)]
        await asyncio.wait(tasks)
        counter.cancel()
    sizes: dict[int, list[int]] = {}
    for number, _, size in work:
        sizes.setdefault(number, []).append(size)
    assert all(sum(each[:-1]) < 10 for each in sizes.values()), sizes  # the last one may exceed it
    assert len(work) == 26 and max(i for i, (_, tenant, _) in enumerate(work) if tenant == "few") < 12
    await asyncio.wait_for(turns.take_turn("many", 4), 10)


async def test_turns_go_on_after_waiters_were_cancelled() -> None:
    turns = LoopTurns(1)
    await turns.take_turn("a", 1)
    waiting = [asyncio.create_task(turns.take_turn("a", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*(turns.take_turn("b", 1) for _ in range(3))), 10)


def test_a_key_may_hold_a_part_of_all_sequences() -> None:
    quotas = TenantQuotas(None, PlaceShares(16, 2))
    with quotas.open_lease("a") as first, quotas.open_lease("a") as second, quotas.open_lease("b") as other:
        first.reserve_sequences(6, counts=False)
        with pytest.raises(QuotaExceededError, match="6 sequences of this key") as refused:
            second.reserve_sequences(3, counts=False)
        assert not refused.value.is_permanent
        other.reserve_sequences(8)
        second.reserve_sequences(2)
        with pytest.raises(QuotaExceededError, match="asks for 9") as refused:
            other.transfer().reserve_sequences(17)
        assert refused.value.is_permanent
    with quotas.open_lease("a") as again:
        again.reserve_sequences(8)


@pytest.mark.parametrize(("total", "tenants"), [(10_496, 5), (64, 7), (16, 3), (3, 2), (2, 2), (1, 2), (7, 1)])
def test_places_are_kept_for_each_tenant(total: int, tenants: int) -> None:
    """Whatever the others take, one by one, a tenant gets its part of the half that is divided."""
    names = [str(i) for i in range(tenants)]
    for quiet in names:
        places, held = PlaceShares(total, tenants), dict.fromkeys(names, 0)
        for name in names:
            while name != quiet and places.take_places(name):
                held[name] += 1
        minimum = total // (2 * tenants) if tenants > 1 else total
        assert minimum <= total - sum(held.values())
        assert all(places.take_places(quiet) for _ in range(minimum))
        held[quiet] = minimum
        assert max(held.values()) <= (total if tenants == 1 else max(1, total // 2))
        for name, count in held.items():
            places.release_places(name, count)
        assert places.take_places(names[-1], places.max_held)  # all of it is free again
        assert not places.take_places(names[-1])
