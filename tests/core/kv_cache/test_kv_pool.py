"""KV pools: shapes by model kind and rank, stores and reads, page 0; and the device page table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.build import Limits
from frame.core.kv_cache.geometry import DTYPES, kv_geometry
from frame.core.kv_cache.kv_pool import MAX_HOST_TOKENS, DeviceTable, KVPool
from tests.core.fake_model import fake_model_config

CPU = torch.device("cpu")


def spec(layer):
    return AttentionSpec(layer, 8, 4, 16, 8, 0.25)


MHA = dataclasses.replace(fake_model_config(), num_layers=3, num_kv_heads=4, num_heads=8, head_dim=16, v_head_dim=8)
MLA = dataclasses.replace(MHA, kind="mla", latent=(32, 8))


@pytest.mark.parametrize("model_config", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("page_size", [1, 16])
def test_stored_tokens_are_read_back(model_config, dtype, page_size):
    geometry = kv_geometry(model_config, 1, page_size, dtype)
    pool = KVPool(geometry, 10, CPU)
    slots = torch.tensor([page_size * 3, page_size * 9 + page_size - 1, page_size])
    shapes = [tensor.shape for tensor in geometry.groups[0].layers[0].tensors]
    values = [torch.randn(3, *shape) for shape in shapes]
    before = [[tensor.clone() for tensor in pool.layer(layer)] for layer in range(3)]
    pool.store(spec(1), slots, *values)
    for layer in range(3):
        for part, tensor in enumerate(pool.layer(layer)):
            assert tensor.shape == (10, page_size, *shapes[part])
            expected = before[layer][part].float().view(-1, *shapes[part])
            if layer == 1:
                expected[slots] = values[part].to(DTYPES[dtype]).float() if dtype != "int8" else values[part]
            if dtype == "int8":
                scales = pool.scales(layer)[part].flatten(0, 1).double()
                read = tensor.view(expected.shape).double() * scales.unsqueeze(-1)
                assert bool(((read - expected.double()).abs() <= 0.502 * scales.unsqueeze(-1)).all()), "more than half a step off"
                continue
            torch.testing.assert_close(tensor.float().view(expected.shape), expected)
    assert pool.num_bytes == 10 * page_size * geometry.bytes_per_token


def test_fp8_saturates_instead_of_becoming_nan():
    pool = KVPool(kv_geometry(MLA, 1, 1, "fp8_e4m3"), 3, CPU)
    pool.store(spec(0), torch.tensor([1]), torch.full((1, 40), 1e6, dtype=torch.bfloat16))
    assert pool.layer(0)[0][1].float().unique().tolist() == [448.0]


def test_an_fp8_cache_holds_keys_and_values_divided_by_their_scales():
    key, value = torch.full((1, 4, 16), 900.0), torch.full((1, 4, 8), 0.01)
    for dtype, kept in (("fp8_e4m3", (225.0, 1.0)), ("float32", (900.0, 0.01))):
        pool = KVPool(kv_geometry(MHA, 1, 1, dtype), 3, CPU)
        pool.store(dataclasses.replace(spec(2), k_scale=4.0, v_scale=0.01), torch.tensor([1]), key, value)
        expected = [torch.tensor(number).to(DTYPES[dtype]).item() for number in kept]
        assert [tensor[1].float().unique().item() for tensor in pool.layer(2)] == pytest.approx(expected)


def test_int8_rows_of_any_magnitude_are_finite():
    pool = KVPool(kv_geometry(MLA, 1, 1, "int8"), 6, CPU)
    rows = torch.ones(5, 40) * torch.tensor([0.0, 1e-30, 1e-3, 6e4, 1e9])[:, None]
    pool.store(spec(0), torch.arange(1, 6), rows)
    codes, scales = pool.layer(0)[0][1:].view(5, 40), pool.scales(0)[0][1:].view(5)
    assert codes[:, 0].tolist() == [0, 0, 127, 127, 127]
    assert torch.isfinite(scales).all()
    torch.testing.assert_close(codes[2:4, 0] * scales[2:4].float(), torch.tensor([1e-3, 6e4]), rtol=2e-3, atol=0)


def test_a_fresh_pool_is_zero_and_aligned():
    pool = KVPool(kv_geometry(MHA, 1, 16, "bfloat16"), 7, CPU)
    for tensor in pool.layer(2):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0


def test_the_table_shares_its_mirror_on_the_cpu_and_has_room_for_one_step_more():
    table = DeviceTable(Limits(max_running_requests=3, max_tokens_per_step=8, max_context=33, page_size=16), CPU)
    assert table.pages.shape == (4, 4)  # ceil(33 / 16) pages, and one more
    table.write_host(np.array([[2, 0, 7], [0, 1, 5]], np.int32))
    assert table.pages[2, 0] == 7
    assert table.pages[0, 1] == 5
    assert not table.pages[table.padding_slot].any()
    assert table.first_host_token == 4 and len(table.last_token) == 4 + MAX_HOST_TOKENS + 1
    table.set_draft_width(3)
    table.drafts[:] = 5
    assert not table.last_token[: 4 + MAX_HOST_TOKENS].any() and table.last_token[-1] == -1


def test_writes_reach_a_table_of_its_own_memory():
    table = DeviceTable(Limits(max_running_requests=3, max_tokens_per_step=8, max_context=33, page_size=16), CPU)
    table.pages = table.pages.clone()  # as on a GPU
    writes = np.array([[2, 0, 7], [0, 1, 5], [2, 3, 9]], np.int32)
    table.write_device(**{name: torch.from_numpy(array) for name, array in table.flat_writes(writes).items()})
    table.write_host(writes)
    assert table.pages.tolist() == table.host_pages.tolist()
