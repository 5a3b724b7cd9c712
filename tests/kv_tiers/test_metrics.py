"""What /metrics shows of the engine's tiers."""

from __future__ import annotations

from frame.core.messages import Heartbeat
from tests.entrypoints.inprocess import serving


async def test_tiers_are_shown_by_name() -> None:
    tiers = [{"tier": name, "loaded_tokens": number, "stored_tokens": 10 + number} for number, name in enumerate(("host", "disk"))]
    async with serving() as server:
        assert "frame_kv_tier" not in (await server.request("GET", "/metrics")).body.decode()
        beat = Heartbeat("engine", tiers=tiers, tier_waiting=3, tier_failed_loads=4, tier_late_loads=6, tier_dropped_blocks=5)
        server.services.client.load = beat  # type: ignore[misc]
        text = (await server.request("GET", "/metrics")).body.decode()
    name = 'model_name="frame-tiny"'
    assert f'frame_kv_tier_loaded_tokens_total{{{name},tier="disk"}} 1.0' in text
    assert f'frame_kv_tier_stored_tokens_total{{{name},tier="host"}} 10.0' in text
    assert f"frame_kv_tier_requests_waiting{{{name}}} 3.0" in text
    assert f'frame_kv_tier_failed_loads_total{{{name},reason="missing"}} 4.0' in text
    assert f'frame_kv_tier_failed_loads_total{{{name},reason="late"}} 6.0' in text
    assert f"frame_kv_tier_dropped_blocks_total{{{name}}} 5.0" in text


async def test_transfers_are_shown() -> None:
    names = ("transfers", "transfer_bytes", "transfer_failures", "leases", "leased_blocks", "expired_leases", "refused_leases")
    counts = {**{name: number for number, name in enumerate(names)}, "read_seconds": 2.5}
    tier = {"tier": "nixl", "loaded_tokens": 0, "stored_tokens": 0, "oldest_lease_seconds": 1.5, **counts}
    async with serving() as server:
        server.services.client.load = Heartbeat("engine", tiers=[tier])  # type: ignore[misc]
        text = (await server.request("GET", "/metrics")).body.decode()
    label = 'model_name="frame-tiny"'
    assert f"frame_kv_transfer_bytes_total{{{label}}} 1.0" in text
    assert f'frame_kv_transfer_seconds_total{{{label},phase="read"}} 2.5' in text
    assert f"frame_kv_leases{{{label}}} 3.0" in text
    assert f"frame_kv_oldest_lease_seconds{{{label}}} 1.5" in text
    assert f"frame_kv_refused_leases_total{{{label}}} 6.0" in text
