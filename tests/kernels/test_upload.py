"""Lists of ids that a kernel copies to the device, and the memory from which it copies."""

from __future__ import annotations

import pytest
import torch

from cases import refused
from hicache.kernels.upload import IdUploader, upload
from transfer_hooks import StreamGate


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000])
def test_every_id_arrives_and_nothing_else_is_written(device: str, kernels: str, count: int) -> None:
    """Ids of any size, also negative ones, arrive in order. Elements after the target do not change."""
    source = torch.randint(-(1 << 62), 1 << 62, (count,), dtype=torch.int64)
    source = source.pin_memory() if device == "cuda" else source
    buffer = torch.full((count + 64,), -5, dtype=torch.int64, device=device)
    upload(source, buffer[:count], kernels)
    assert torch.equal(buffer[:count].cpu(), source) and bool((buffer[count:] == -5).all())


def test_ids_that_do_not_fit_are_refused() -> None:
    """Ids of another length, dtype or device, and an unknown implementation, are refused."""
    ids = torch.arange(4)
    refused(
        ValueError,
        lambda: upload(ids, ids[:3].clone(), "torch"),
        lambda: upload(ids.int(), ids.clone(), "torch"),
        lambda: upload(ids, ids.float(), "torch"),
        lambda: upload(ids.to("meta"), ids.clone(), "torch"),
        lambda: upload(ids, ids.clone(), "cuda"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_memory_is_used_again_only_when_it_was_read(kernels: str) -> None:
    """While the stream is held, many lists of growing lengths are sent. Each list arrives completely, although the
    caller changes its own memory at once. Afterwards the same memory is used again."""
    device = torch.device("cuda", torch.cuda.current_device())
    lengths = [1 + 300 * turn for turn in range(20)]
    compiles = IdUploader(device, kernels)  # the host waits for this compilation
    for length in lengths:
        compiles(torch.arange(length))
    uploader = IdUploader(device, kernels)
    for _ in range(2):
        torch.cuda.synchronize()
        gate = StreamGate()
        gate.hold(torch.cuda.current_stream())
        sent, arrived = [], []
        for turn, length in enumerate(lengths):
            ids = torch.arange(length) * (turn + 1)
            sent.append(ids.clone())
            arrived.append(uploader(ids))
            ids.fill_(-1)
        gate.open()
        assert all(torch.equal(on_device.cpu(), ids) for on_device, ids in zip(arrived, sent, strict=True))
        assert uploader.num_pinned == 20
    torch.cuda.synchronize()
    on_device = uploader(sent[3])
    assert uploader(on_device) is on_device and torch.equal(on_device.cpu(), sent[3]) and uploader.num_pinned == 20
