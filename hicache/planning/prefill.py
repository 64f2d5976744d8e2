"""What a prefill computes, as a formula over the prompt's length.

    flops(n) = n * token + head + full * n (n + 1) / 2 + window * sum of min(i, window) + chunk * sum of i within chunks

`token` is twice the weights that a token is multiplied with (a multiplication and an addition each), of experts those
that it chooses, plus six operations an element of a recurrent state. A query and a key cost twice the elements of key
and value in each query head (score, weighted sum). Norms, activations, rotations and softmax are left out, as PyTorch's
FlopCounterMode leaves them out. The head counts once: the last token alone is wanted. Kaplan et al. 2020
(arXiv:2001.08361), section 2.1, with attention by position.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillWork:
    """Operations of a token, of the head, and of a query and key over all layers of a kind."""

    token_flops: int
    head_flops: int
    full_pair_flops: int
    window_pair_flops: int = 0
    chunk_pair_flops: int = 0
    window: int = 0
    chunk: int = 0

    def flops(self, num_tokens: int) -> int:
        """Of a prompt of `num_tokens` tokens, none of them cached."""
        total = num_tokens * self.token_flops + self.head_flops + self.full_pair_flops * _pairs(num_tokens)
        if self.window:
            inside = min(num_tokens, self.window)
            total += self.window_pair_flops * (_pairs(inside) + (num_tokens - inside) * self.window)
        if self.chunk:
            whole, rest = divmod(num_tokens, self.chunk)
            total += self.chunk_pair_flops * (whole * _pairs(self.chunk) + _pairs(rest))
        return total


def _pairs(num_tokens: int) -> int:
    """Queries and the keys at or before them."""
    return num_tokens * (num_tokens + 1) // 2
