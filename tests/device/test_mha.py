"""The pool of keys and values: stored values are read back."""

from __future__ import annotations

import pytest
import torch

from device_case import Layer, pool_of
from hicache.errors import OutOfMemory

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def random_kv(tokens: int, v_dim: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, 2, dim, generator=generator) for dim in (8, v_dim))
    return k.to(BF16), v.to(BF16)


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16, E4M3, E5M2])
@pytest.mark.parametrize("v_dim", [8, 5])
def test_what_is_stored_is_read(device: str, kernels: str, dtype: torch.dtype, v_dim: int) -> None:
    """The rows of each layer are read back as the input in the pool's dtype, at their slots only."""
    pool = pool_of("mha", device, dtype=dtype, v_head_dim=v_dim)
    loc = torch.tensor([30, 4, 17, 9, 33], device=device)
    expected = []
    for layer_id in range(3):
        k, v = random_kv(5, v_dim, seed=layer_id)
        pool.set_kv_buffer(Layer(layer_id) if layer_id else 0, loc, k.to(device), v.to(device))
        expected.append((k.to(dtype).float(), v.to(dtype).float()))
    for layer_id, (k, v) in enumerate(expected):
        keys, values = pool.get_kv_buffer(layer_id)
        assert keys.dtype == values.dtype == dtype
        assert keys.shape == (36, 2, 8) and values.shape == (36, 2, v_dim)
        for got, rows in ((keys, k), (values, v)):
            complete = torch.zeros(36, 2, rows.shape[-1])
            complete[loc.cpu()] = rows
            assert torch.equal(got.float().cpu(), complete)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_scales_divide_and_inputs_stay(device: str, kernels: str, dtype: torch.dtype) -> None:
    """A stored value is the input divided by its scale, which may be one number or several. Input and scale do not
    change."""
    pool = pool_of("mha", device, dtype=dtype)
    k, v = (x.to(device) for x in random_kv(3))
    v_scale = torch.tensor([4.0], device=device)
    before = k.clone(), v.clone()
    loc = torch.tensor([5, 6, 8], device=device)
    for k_scale in (0.5, torch.tensor(0.5), torch.tensor([[0.5], [2.0]], device=device)):
        pool.set_kv_buffer(1, loc, k, v, k_scale=k_scale, v_scale=v_scale)
        assert torch.equal(k, before[0]) and torch.equal(v, before[1]) and v_scale.item() == 4.0
        keys, values = pool.get_kv_buffer(1)
        assert torch.equal(keys.float()[loc], (k.float() / k_scale).to(dtype).float())
        assert torch.equal(values.float()[loc], (v / v_scale).to(dtype).float())


@pytest.mark.gpu
def test_a_pool_larger_than_the_device_is_refused() -> None:
    """A pool that does not fit raises OutOfMemory with the needed bytes, the free bytes and the setting, and leaves no
    memory allocated."""
    before = torch.cuda.memory_allocated()
    with pytest.raises(OutOfMemory, match="device_tokens"):
        pool_of("mha", "cuda", size=1 << 40)
    assert torch.cuda.memory_allocated() == before
