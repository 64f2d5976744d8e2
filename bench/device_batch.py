"""The batch of `examples/sglang_batch.py` in the bench `device`: served like SGLang, against plain attention.

The ceiling is the same model with torch's attention over contiguous keys and values, without allocating, matching or
caching. On CUDA the geometry is an 8B model's in bfloat16, with only attention layers. First the requests are served in
a pool that is too small for all, so that one is retracted, and every generated token is compared with plain attention;
a difference is an error.

    prefill            prompt tokens of all requests, in chunks       complete prompts, causal
    decode             one step of all requests                       the same step
    retract, restore   twice `copy_tokens`, by tiled copies           plain copies between pinned and device memory
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hicache.bench.common import BenchUnavailable, Report, interleave, timer_for
from hicache.bench.machine import ROOT


@dataclass(frozen=True)
class BatchShape:
    """`requests` prompts of `prompt_len` tokens; sizes in tokens."""

    geometry: str
    dtype: torch.dtype
    requests: int
    prompt_len: int
    page_size: int
    chunk_tokens: int
    copy_tokens: int

    @property
    def checked_tokens(self) -> int:
        """New tokens of each request in the comparison: they fill its last page and need another one."""
        return self.page_size + 4


CUDA = BatchShape("LLAMA_8B", torch.bfloat16, 16, 4096, 16, 8192, 8192)
CPU = BatchShape("TINY", torch.float32, 3, 32, 4, 16, 16)
_WARM_UP = 2


class _Batches:
    """Builds servers and prompts of one shape."""

    def __init__(self, shape: BatchShape, samples: int, device: torch.device) -> None:
        if ROOT is None:
            raise BenchUnavailable("the case `batch` runs examples/sglang_batch.py, which is in a clone only")
        self.example = runpy.run_path(str(ROOT / "examples" / "sglang_batch.py"))
        self.shape = shape
        self.geometry = self.example[shape.geometry]
        self.device = device
        self.max_len = shape.prompt_len + max(samples + _WARM_UP, shape.checked_tokens) + 2 * shape.page_size
        self.model = self.example["Model"](self.geometry, self.max_len, device, shape.dtype)
        self._generator = torch.Generator().manual_seed(0)

    def server(self, num_tokens: int, plain: Any = None) -> Any:
        shape = self.shape
        return self.example["Server"](
            self.model, num_tokens, self.max_len, shape.requests, shape.page_size, shape.chunk_tokens,
            shape.copy_tokens, plain,
        )  # fmt: skip

    def requests(self, new_tokens: int) -> list[Any]:
        """Requests with new random prompts."""
        size = (self.shape.requests, self.shape.prompt_len)
        prompts = torch.randint(0, self.geometry.vocab, size, generator=self._generator).tolist()
        return [self.example["Request"](prompt, new_tokens) for prompt in prompts]


def measure_batch(report: Report, samples: int, device: torch.device) -> None:
    batches = _Batches(CUDA if device.type == "cuda" else CPU, samples, device)
    _check(batches)
    _measure_prefill(report, batches, samples)
    _measure_decode(report, batches, samples)
    _measure_copies(report, batches, samples)


def _check(batches: _Batches) -> None:
    """Serve the requests with a retraction, and compare each generated token."""
    shape = batches.shape
    plain = batches.example["PlainAttention"](batches.geometry, batches.max_len, batches.device, shape.dtype)
    # Admission reserves the prompt of each request and one more page. Decoding needs a second page.
    pages = shape.requests * (shape.prompt_len // shape.page_size + 1)
    server = batches.server(pages * shape.page_size, plain)
    server.serve(batches.requests(shape.checked_tokens))
    server.check()
    if not server.counts["restored"]:
        raise AssertionError(f"no request was retracted and restored: {server.counts}")


def _measure_prefill(report: Report, batches: _Batches, samples: int) -> None:
    shape, model = batches.shape, batches.model
    num_tokens = shape.requests * shape.prompt_len
    server = batches.server(num_tokens + shape.requests * 2 * shape.page_size)
    positions = torch.arange(shape.prompt_len, device=batches.device)
    ready = [batches.requests(1) for _ in range(samples + _WARM_UP)]
    tokens = torch.tensor([req.origin_input_ids for req in ready[0]], device=batches.device)

    def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (rows.transpose(0, 1)[None] for rows in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    def plain() -> None:
        for prompt in tokens:
            model.next_tokens(model.forward(prompt, positions, attend)[-1:])

    variants = {"batch": lambda: server.serve(ready.pop()), "plain": plain}
    _report_tokens(report, "batch.prefill", num_tokens, variants, samples, batches.device)
    server.check()


def _measure_decode(report: Report, batches: _Batches, samples: int) -> None:
    shape, geometry, model, device = batches.shape, batches.geometry, batches.model, batches.device
    server = batches.server(shape.requests * batches.max_len)
    server.waiting.extend(batches.requests(samples + _WARM_UP + 2))
    while len(server.running) < shape.requests:
        server.step()
    size = (geometry.layers, 2, shape.requests, geometry.kv_heads, batches.max_len, geometry.head_dim)
    kv = torch.randn(size, device=device, dtype=shape.dtype)
    tokens, end = torch.zeros(shape.requests, dtype=torch.int64, device=device), [shape.prompt_len]

    def attend(layer: int, q: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        for target, new in zip(kv[layer], rows, strict=True):
            target[:, :, end[0] - 1] = new
        keys, values = kv[layer, :, :, :, : end[0]]
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    def plain() -> None:
        end[0] += 1
        model.next_tokens(model.forward(tokens, torch.full_like(tokens, end[0] - 1), attend))

    variants = {"batch": server.step, "plain": plain}
    _report_tokens(report, "batch.decode", shape.requests, variants, samples, device)


def _measure_copies(report: Report, batches: _Batches, samples: int) -> None:
    """Measure retraction and restoration of a request in scattered pages, in copies of `copy_tokens`."""
    shape, device = batches.shape, batches.device
    num_tokens = 2 * shape.copy_tokens
    server = batches.server(2 * num_tokens)
    pages = server.allocator.alloc(2 * num_tokens).view(-1, shape.page_size)
    slots = pages[torch.randperm(len(pages), device=device)[: len(pages) // 2]].flatten()
    for buffer in server.buffers:
        buffer.normal_()
    expected = [buffer[slots] for buffer in server.buffers]
    host = server.to_cpu(slots)
    for buffer in server.buffers:
        buffer.zero_()
    server.from_cpu(host, slots)
    for buffer, rows in zip(server.buffers, expected, strict=True):
        if not torch.equal(buffer[slots], rows):
            raise AssertionError("the rows of a restored request are not those of the retracted one")
    on_device = torch.empty(host.shape, dtype=host.dtype, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        return lambda: target.copy_(source, non_blocking=True)

    variants = {
        "retract": lambda: server.to_cpu(slots), "down": copy(host, on_device),
        "restore": lambda: server.from_cpu(host, slots), "up": copy(on_device, host),
    }  # fmt: skip
    seconds = interleave(variants, samples=samples, warmup=_WARM_UP, timer=timer_for(device))
    report.rate("batch.retract", host.nbytes, seconds["retract"], ceiling_seconds=seconds["down"])
    report.rate("batch.restore", host.nbytes, seconds["restore"], ceiling_seconds=seconds["up"])


def _report_tokens(
    report: Report,
    name: str,
    num_tokens: int,
    variants: dict[str, Callable[[], object]],
    samples: int,
    device: torch.device,
) -> None:
    seconds = interleave(variants, samples=samples, warmup=_WARM_UP, timer=timer_for(device))
    rates = {variant: [num_tokens / s for s in times] for variant, times in seconds.items()}
    report.case(name, rates["batch"], "tokens/s", ceiling=rates["plain"])
