"""The tensor cache over three tiers: tensors are unchanged when they return from any tier, and every tier keeps its
limits."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError, HiCacheError, InvariantError, ShapeError
from hicache.host.pool import HostPagePool
from hicache.prefix_cache.tensor_cache import HiCache
from hicache.prefix_cache.tensor_header import TensorHeader
from hicache.storage import StoreMismatch, open_existing
from hicache.storage.index import Index
from hicache.storage.slot_file import SlotFile

BLOCK = 4096
SMALL = {"l2_bytes": 64 * BLOCK, "disk_bytes": 16 << 20, "block_bytes": BLOCK}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (*shape,), generator=generator).to(torch.float32).add(seed).to(dtype)


def same(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if got is None or got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    flat = (x.cpu().contiguous().reshape(-1).view(torch.uint8) for x in (got, expected))
    return torch.equal(*flat)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_comes_back(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Scalars, empty and transposed tensors, and tensors of many blocks are the same bit for bit from all three
    tiers."""
    shapes = [(), (0,), (3, 0, 2), (1,), (7, 5), (3, 1000, 3), (BLOCK - 256,), (BLOCK - 255,)]
    values = [tensor(*shape, dtype=dtype, seed=i % 2) for i, shape in enumerate(shapes)]
    values.append(tensor(40, 50, dtype=dtype).t())
    with HiCache(1, 2, tmp_path, device=device, **SMALL) as cache:
        for i, value in enumerate(values):
            cache.put(f"name {i}", value.to(device))
        cache.check()
        stats = cache.stats()
        assert (stats.l1_tensors, stats.l2_tensors, stats.to_l3) == (1, 2, len(values) - 3)
        for i, value in enumerate(values):
            got = cache.get(f"name {i}")
            assert got is not None and got.device.type == device and same(got, value)
            cache.check()


def test_hits_move_up_and_overflow_moves_down_by_recency(tmp_path: Path) -> None:
    """Recency decides which tier holds a tensor, and each hit is counted for its tier."""
    with HiCache(2, 2, tmp_path, **SMALL) as cache:
        for name in "abcdef":
            cache.put(name, tensor(10, seed=ord(name)))
        for name, tier in (("f", "l1"), ("c", "l2"), ("a", "l3"), ("c", "l1"), ("f", "l2"), ("e", "l2"), ("d", "l3")):
            before = cache.stats()
            assert same(cache.get(name), tensor(10, seed=ord(name)))
            after = cache.stats()
            hits = {t: getattr(after, f"{t}_hits") - getattr(before, f"{t}_hits") for t in ("l1", "l2", "l3")}
            assert hits == {t: int(t == tier) for t in hits}, name
            cache.check()
        assert cache.get("nothing") is None and cache.get(b"a") is None
        assert cache.stats().misses == 2 and cache.stats().hit_rate == 7 / 9


def test_a_copy_is_kept(tmp_path: Path) -> None:
    """Writing to a tensor after `put`, or to the tensor that it is a slice of, does not change the cached copy."""
    with HiCache(2, 2, tmp_path, **SMALL) as cache:
        parent = tensor(1000, 8)
        kept = parent[10:12]
        expected = kept.clone()
        cache.put("x", kept)
        parent.zero_()
        got = cache.get("x")
        assert same(got, expected)
        assert got is not None and got.untyped_storage().nbytes() == expected.nbytes


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("broken", [(), ((SlotFile, "write"), (SlotFile, "punch")), ((Index, "changes"),)])
@pytest.mark.parametrize("at_close", [False, True])
def test_a_disk_that_takes_nothing_keeps_no_old_tensor(
    broken: Sequence[tuple[type, str]], at_close: bool, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full or fails, a name with a new tensor has the new tensor or none, never the old one. The old
    tensor does not return when memory has evicted the new one, when the disk works again, and after a restart, also if
    the disk was full until the end. All other tensors are there all the time, and a disk that works again stores
    tensors as before."""

    def holds(name: str, seed: int) -> bool | None:
        found = cache.get(name)
        return None if found is None else same(found, tensor(3000, seed=seed))

    ballast = small_disk / "ballast"
    with HiCache(1, 1, small_disk / "store", **SMALL) as cache:
        for name in ("x", "y", "kept", "more", "another"):
            cache.put(name, tensor(3000, seed=1))
        with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(BLOCK)):
                pass
        for owner, call in broken:
            monkeypatch.setattr(owner, call, fail)
        for name in ("large", "larger"):
            cache.put(name, torch.rand(100_000))
        for name in ("x", "y", "a", "b", "c"):
            cache.put(name, tensor(3000, seed=2))
        assert holds("x", 2) is not False and holds("y", 2) is not False and holds("kept", 1)
        assert cache.stats().dropped >= 2
        cache.check()
        monkeypatch.undo()
        if not at_close:
            ballast.unlink()
            cache.put("y", tensor(3000, seed=3))
    with HiCache(1, 1, small_disk / "store", **SMALL) as cache:
        assert holds("x", 2) is not False and holds("kept", 1)
        assert holds("y", 2) is not False if at_close else holds("y", 3)
        cache.check()


def test_everything_is_found_after_a_restart(tmp_path: Path) -> None:
    """`close` writes all tensors in memory to disk; another cache over the directory finds them."""
    values = {str(i): tensor(100 * i + 1, seed=i) for i in range(9)}
    with HiCache(3, 3, tmp_path, **SMALL) as cache:
        for name, value in values.items():
            cache.put(name, value)
    cache.close()
    with pytest.raises(HiCacheError):
        cache.get("1")
    with HiCache(3, 3, tmp_path, **SMALL) as again:
        again.check()
        assert all(same(again.get(name), value) for name, value in values.items())
    with pytest.raises(StoreMismatch):
        HiCache(3, 3, tmp_path, namespace="another model", **SMALL)


def test_every_tier_is_bounded(tmp_path: Path) -> None:
    """L1, L2 and the file stay within their limits in bytes, while a multiple of these bytes is put."""
    limits = {"l1_bytes": 100_000, "l2_bytes": 64 * BLOCK, "disk_bytes": 1 << 20, "block_bytes": BLOCK}
    generator = torch.Generator().manual_seed(0)
    with HiCache(50, 50, tmp_path, **limits) as cache:
        for i in range(90):
            cache.put(str(i), torch.randn(10_000 + i, generator=generator))
            stats = cache.stats()
            assert stats.l1_bytes <= 100_000 and stats.l2_bytes <= 64 * BLOCK and stats.disk_bytes <= 1 << 20
        cache.check()
        assert cache.get("0") is None and cache.get("89") is not None


def test_tensors_too_large_for_a_tier(tmp_path: Path) -> None:
    """A tensor that is larger than L2 goes directly to disk. A tensor that is larger than L1 stays alone in L1. Without
    a disk it is dropped."""
    large = tensor(100 * BLOCK, dtype=torch.uint8)
    with HiCache(2, 2, tmp_path, l1_bytes=BLOCK, **SMALL) as cache:
        cache.put("large", large)
        assert cache.stats().l1_tensors == 1
        cache.put("next", tensor(1))
        assert (cache.stats().l2_tensors, cache.stats().to_l3) == (0, 1)
        assert same(cache.get("large"), large)
        cache.check()
    with HiCache(1, 0, None, **SMALL) as cache:
        cache.put("a", tensor(1))
        cache.put("b", tensor(1))
        assert cache.get("a") is None and cache.stats().dropped == 1


def test_an_incomplete_tensor_is_a_miss(tmp_path: Path) -> None:
    """A tensor with a missing block or an invalid header is a miss; its blocks are deleted."""
    with HiCache(1, 1, tmp_path, **SMALL) as cache:
        for name in "abc":
            cache.put(name, tensor(5 * BLOCK, dtype=torch.uint8))
    store = open_existing(tmp_path)
    blocks = store.stats().entries
    names = {name: hashlib.sha256(b"s" + name.encode()).digest() for name in "abc"}
    block = torch.empty(BLOCK, dtype=torch.uint8).numpy()
    assert store.get_into([names["a"]], [block]) == [True]
    header = TensorHeader.unpack(block[:256].tobytes())
    assert header is not None and store.delete([header.nonce + (3).to_bytes(8, "little")]) == 1
    assert store.get_into([names["b"]], [block]) == [True]
    store.delete([names["b"]])
    block[0] ^= 1
    assert store.put([(names["b"], block)]) == [True]
    store.close()
    with HiCache(1, 1, tmp_path, **SMALL) as cache:
        assert cache.get("a") is None and cache.get("b") is None
        assert same(cache.get("c"), tensor(5 * BLOCK, dtype=torch.uint8))
        assert cache.stats().disk_blocks == blocks - 6
        cache.check()


def test_invalid_headers_are_refused() -> None:
    """A header whose shape does not match its bytes, or of another version, is refused."""
    header = TensorHeader.of(tensor(3, 5))
    packed = bytearray(header.pack())
    assert len(packed) == 256 and TensorHeader.unpack(bytes(packed)) == header
    for place in (0, 4, 5, 6, 8, 33):
        broken = bytearray(packed)
        broken[place] ^= 0x41
        assert TensorHeader.unpack(bytes(broken)) is None, place


def test_wrong_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid sizes raise an error with the setting, and so do unsupported tensors. `check` finds lost blocks."""
    for wrong in ({"l1_max": 0}, {"l2_max": -1}, {"block_bytes": 100}, {"l2_bytes": BLOCK}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            HiCache(**{"l1_max": 1, "l2_max": 1, "path": tmp_path, **SMALL, **wrong})
    with HiCache(1, 1, None, **SMALL) as cache:
        for unsupported in (tensor(2, 2, dtype=torch.float32).to_sparse(), tensor(*[1] * 30)):
            with pytest.raises(ShapeError):
                cache.put("x", unsupported)
        cache.put("a", tensor(1))
        cache.put("b", tensor(1))
        cache.check()
        monkeypatch.setattr(HostPagePool, "available", lambda self: 0)
        with pytest.raises(InvariantError):
            cache.check()


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3 * BLOCK)), max_size=30))
def test_equals_a_dict(steps: list[tuple[bool, int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """With enough disk, any puts and gets answer as a dict does, also after a restart."""
    expected: dict[str, torch.Tensor] = {}
    folder = tmp_path_factory.mktemp("cache")

    def require(cache: HiCache, key: str) -> None:
        found = cache.get(key)
        assert same(found, expected[key]) if key in expected else found is None

    with HiCache(1, 2, folder, **SMALL) as cache:
        for seed, (is_put, name, size) in enumerate(steps):
            if is_put:
                expected[str(name)] = tensor(size, dtype=torch.uint8, seed=seed)
                cache.put(str(name), expected[str(name)])
            else:
                require(cache, str(name))
        cache.check()
    with HiCache(1, 2, folder, **SMALL) as again:
        for name in range(6):
            require(again, str(name))
