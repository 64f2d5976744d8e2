"""The planner's view of a model, and presets: values that transformers computes from the published `config.json` files.

The presets are constants, so that planning a preset needs no transformers. A test computes them again from the
`config.json` files.

The operations of a prefill are a formula over the prompt's length:

    flops(n) = n * token + head + full * n (n + 1) / 2 + window * sum of min(i, window) + chunk * sum of i within chunks

`token` is twice the number of weights that a token is multiplied with, plus six operations per element of a recurrent
state. Of experts, only the selected ones count. In each query head, a pair of query and key takes two operations per
element of key (score) and value (weighted sum). Norms, activations, rotations and softmax are left out, as in PyTorch's
FlopCounterMode. The head counts once for each prompt, because only the last token needs logits. Source: Kaplan et al.
2020 (arXiv:2001.08361), section 2.1, with attention by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.layout import LatentGeometry, ModelGeometry, StateGeometry


@dataclass(frozen=True)
class PrefillWork:
    """The numbers of operations of a prefill. `token_flops`: per token. `head_flops`: of the head, once.
    `*_pair_flops`: per pair of query and key, in all layers of a kind together."""

    token_flops: int
    head_flops: int
    full_pair_flops: int
    window_pair_flops: int = 0
    chunk_pair_flops: int = 0
    window: int = 0
    chunk: int = 0

    def flops(self, num_tokens: int) -> int:
        """Return the number of operations of a prefill of `num_tokens` tokens without any cached token."""
        total = num_tokens * self.token_flops + self.head_flops + self.full_pair_flops * _pairs(num_tokens)
        if self.window:
            inside = min(num_tokens, self.window)
            total += self.window_pair_flops * (_pairs(inside) + (num_tokens - inside) * self.window)
        if self.chunk:
            num_chunks, rest = divmod(num_tokens, self.chunk)
            total += self.chunk_pair_flops * (num_chunks * _pairs(self.chunk) + _pairs(rest))
        return total


def _pairs(num_tokens: int) -> int:
    """Return the number of pairs of a query and a key at the same or an earlier position, in a prompt of
    `num_tokens`."""
    return num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True)
class PlannedModel:
    """A model without weights. `num_active`: number of weights that a token is multiplied with, without the head.
    `weight_bytes`: bytes of all weights. `max_context_len`: maximum number of positions that the model supports."""

    name: str
    geometry: ModelGeometry
    num_weights: int
    num_active: int
    weight_bytes: int
    max_context_len: int
    work: PrefillWork


_BF16 = torch.bfloat16
_STATE = StateGeometry(((8192, 4),), (32, 128, 128), torch.bfloat16, torch.float32)
_MODELS = (
    PlannedModel(
        "llama-3.1-8b",
        ModelGeometry(32, 8, 128, dtype=_BF16),
        8_030_261_248, 6_979_321_856, 16_060_522_496, 131072,
        PrefillWork(13_958_643_712, 1_050_673_152, 524_288),
    ),
    PlannedModel(
        "llama-3.1-70b",
        ModelGeometry(80, 8, 128, dtype=_BF16),
        70_553_706_496, 68_451_041_280, 141_107_412_992, 131072,
        PrefillWork(136_902_082_560, 2_101_346_304, 2_621_440),
    ),
    PlannedModel(
        "qwen3-8b",
        ModelGeometry(36, 8, 128, dtype=_BF16),
        8_190_735_360, 6_945_767_424, 16_381_470_720, 40960,
        PrefillWork(13_891_534_848, 1_244_659_712, 589_824),
    ),
    PlannedModel(
        "qwen3-32b",
        ModelGeometry(64, 8, 128, dtype=_BF16),
        32_762_123_264, 31_205_621_760, 65_524_246_528, 40960,
        PrefillWork(62_411_243_520, 1_555_824_640, 2_097_152),
    ),
    PlannedModel(
        "deepseek-v3",
        ModelGeometry(61, 1, 576, dtype=_BF16, latent=LatentGeometry(512, 64)),
        671_026_404_352, 35_697_917_952, 672_880_769_024, 163840,
        PrefillWork(71_395_835_904, 1_853_358_080, 4_997_120),
    ),
    PlannedModel(
        "gemma-3-27b",
        ModelGeometry(62, 16, 128, layer_kinds=((*("window",) * 5, "full") * 11)[:62], window=1024, dtype=_BF16),
        27_009_346_304, 25_598_361_600, 54_018_692_608, 131072,
        PrefillWork(51_196_723_200, 2_819_260_416, 163_840, 851_968, window=1024),
    ),
    PlannedModel(
        "gpt-oss-120b",
        ModelGeometry(36, 8, 64, layer_kinds=("window", "full") * 18, window=128, dtype=_BF16),
        116_829_156_672, 4_551_966_720, 65_190_340_224, 131072,
        PrefillWork(9_103_933_440, 1_158_266_880, 294_912, 294_912, window=128),
    ),
    PlannedModel(
        "qwen3-next-80b-a3b",
        ModelGeometry(48, 2, 256, layer_kinds=(*("recurrent",) * 3, "full") * 12, state=_STATE, dtype=_BF16),
        79_674_391_296, 3_251_208_192, 159_348_782_592, 262144,
        PrefillWork(6_615_662_592, 622_329_856, 196_608),
    ),
)  # fmt: skip
PRESETS = {model.name: model for model in _MODELS}
