"""An engine's loop on rank 0 with followers in threads, which get batches and orders over sockets
as processes do. Used by the tests of tiers with several ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frame.config.schema import FrameConfig
from frame.core.interfaces.platform import HOST
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.processes.build_engine import _lead, add_group, build_tiers, follow_tiers, load_parts
from frame.entrypoints.processes.build_scheduler import build_schedulers
from frame.entrypoints.processes.components import RunnerPlan, build_runner
from frame.entrypoints.processes.join_groups import Groups, Place, join_groups
from frame.host.socket_directory import SocketDirectory
from frame.parallel.rank_channels import BatchReceiver, BatchSender, ResultReceiver, ResultSender
from frame.parallel.rank_watch import RankWatch
from frame.parallel.tp_follower import follow
from frame.testing.local_loop import LocalLoop

PATIENCE = 120.0  # seconds


def prepare_ranks(folder: Path, blocks: Path | None, num_tokens: int, tiers: tuple[str, ...] = (), **sections: Any) -> Prepared:
    """A configuration with these tiers, whose pool has pages for `num_tokens`."""
    known = {"kv_tier/host": {"size_gib": 0.05}, "kv_tier/disk": {"folder": str(blocks), "size_gib": 0.1, "buffer_gib": 0.02}}
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "cache": {"max_total_tokens": num_tokens, "page_size": 4},
        "scheduler": {"max_running_requests": 4, "chunked_prefill_size": 32},
        "execution": {"device": "cpu", "threads": 1},
        **sections,
    }
    if tiers:
        config["cache"] |= {"tiers": tiers, "min_load_tokens": 4}
        config["plugins"] = {"options": {f"kv_tier/{name}": known[f"kv_tier/{name}"] for name in tiers}}
    return prepare(FrameConfig.model_validate(config))


def run_ranks(
    prepared: Prepared, scratch: Path, act: Callable[[LocalLoop], Any], on_tiers: Callable[[int, Any], None] | None = None
) -> Any:
    """The result of `act` with rank 0's loop. on_tiers: called with the number of each follower and
    its tiers."""
    size, sockets = prepared.resolved.plan.num_ranks, SocketDirectory()
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(_run_rank, prepared, scratch, sockets, rank, act, on_tiers) for rank in range(size)]
        done, _ = wait(futures, timeout=PATIENCE, return_when=FIRST_EXCEPTION)
        return next(result for result in [future.result() for future in futures if future in done])


@contextmanager
def _joined(prepared: Prepared, scratch: Path, rank: int) -> Iterator[Groups]:
    size = prepared.resolved.plan.num_ranks
    place = Place(rank, size, f"file://{scratch / 'ranks'}", watch=RankWatch(rank, size))
    groups = join_groups(prepared.resolved, prepared.registry, place, HOST)
    try:
        yield groups
    finally:
        pipeline = (groups.pipeline.hidden, groups.pipeline.tokens) if groups.pipeline is not None else ()
        for group in (groups.tp, groups.experts, *pipeline):  # ranks that wait for this one raise
            if group is not None:
                group.close()


class _Paced:
    """A scheduler that lets other threads run where it has no step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule_batch(self, now: float) -> Any:
        batch = self._scheduler.schedule_batch(now)
        if batch is None:
            time.sleep(0.001)
        return batch


def _run_rank(
    prepared: Prepared, scratch: Path, sockets: SocketDirectory, rank: int, act: Callable[[LocalLoop], Any], on_tiers: Any
) -> Any:
    resolved, registry = prepared.resolved, prepared.registry
    plan = resolved.plan
    with _joined(prepared, scratch, rank) as groups:
        own = build_runner(RunnerPlan(resolved, load_parts(resolved, registry), HOST, groups))
        runner = add_group(resolved, own, own, rank)
        replies = sockets.address("rank-replies")
        if rank:
            batches = BatchReceiver(sockets.address(f"batches-{rank}"), rank, replies)
            results = ResultSender(sockets.address(f"rank-results-{rank}")) if rank in plan.result_ranks else None
            tiers = follow_tiers(resolved, registry, own, rank)
            if on_tiers is not None:
                on_tiers(rank, tiers)
            return follow(runner, batches, results=results, group=plan.find_group(rank), tiers=tiers)
        followers = BatchSender([sockets.address(f"batches-{other}") for other in range(1, plan.num_ranks)], replies)
        receivers = [ResultReceiver(sockets.address(f"rank-results-{other}")) for other in plan.result_ranks if other]
        leader = _lead(runner, followers, receivers, Place(0, plan.num_ranks))
        make_tiers = build_tiers(resolved, registry, own, followers)
        scheduler: Any = build_schedulers(resolved, registry, own.capacity.pools, make_group_tiers=make_tiers)
        loop = LocalLoop(_Paced(scheduler), leader)
        try:
            return act(loop)
        finally:
            scheduler.close()
            leader.close()
