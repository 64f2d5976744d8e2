"""The parameters and results of the prefix caches, with SGLang's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hicache.errors import ConfigError
from hicache.prefix_cache.node import TreeNode
from hicache.prefix_cache.radix_key import RadixKey

_NO_EFFECT = ["tp_cache_group", "enable_metrics", "pp_rank", "pp_size", "disable_finished_insert", "cache_ttl_seconds"]


@dataclass(frozen=True)
class CacheInitParams:
    """The parameters of a prefix cache; sizes are in tokens.

    A simulation may set `token_to_kv_pool_allocator` to None, and also `req_to_token_pool` if it caches no requests.
    Only schedulers read `chunked_prefill_size`. The fields from `tp_cache_group` on exist because SGLang's schedulers
    pass them. They must have their defaults: one rank, no metrics, finished requests are inserted, no expiry.
    """

    disable: bool
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    page_size: int
    is_eagle: bool = False
    eviction_policy: str = "lru"
    enable_kv_cache_events: bool = False
    enable_mamba_extra_buffer: bool = False
    chunked_prefill_size: int | None = None
    sliding_window_size: int | None = None
    mamba_cache_chunk_size: int = 64
    tp_cache_group: Any = None
    enable_metrics: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    disable_finished_insert: bool = False
    cache_ttl_seconds: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that these caches do not implement."""
        for name in _NO_EFFECT:
            given, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if given != default:
                raise ConfigError(f"{name}={given!r} is not supported by these caches; set it to {default!r}")


class MatchPrefixParams(NamedTuple):
    """The arguments of `match_prefix`. With `cow_mamba`, `req` gets a copy of the matched recurrent state."""

    key: RadixKey
    cow_mamba: bool = False
    req: Any = None


class MatchResult(NamedTuple):
    """The longest usable prefix.

    `device_indices`: slots of the prefix, int64 `[tokens]`. `last_device_node`: the node at the end of the prefix.
    `last_host_node` and `host_hit_length` belong to a host tier, which these caches do not have.
    `mamba_branching_seqlen`: the length at which a stored recurrent state would have made the match longer, or None.
    """

    device_indices: torch.Tensor
    last_device_node: TreeNode
    last_host_node: TreeNode
    host_hit_length: int = 0
    mamba_branching_seqlen: int | None = None


class InsertParams(NamedTuple):
    """The arguments of `insert`.

    `value`: the slots of the tokens `key`, int64 `[tokens]`; if it is None, the token ids serve as slots.
    `mamba_value`: the state `[1]` that has consumed exactly the tokens of `key`. `prev_prefix_len`: number of first
    tokens whose slots the caller got from a match. `swa_evicted_seqlen`: number of first tokens whose window slots were
    freed. `chunked`: whether more chunks of the request's prompt will be computed.
    """

    key: RadixKey
    value: torch.Tensor | None = None
    mamba_value: torch.Tensor | None = None
    prev_prefix_len: int = 0
    swa_evicted_seqlen: int = 0
    chunked: bool = False
    priority: int = 0


class InsertResult(NamedTuple):
    """The result of `insert`. `prefix_len`: number of tokens of the key that were in the tree before the insert.
    `mamba_exist`: whether the tree already had a state at the end of the key; if so, the caller frees the offered
    state."""

    prefix_len: int
    mamba_exist: bool = False


class EvictParams(NamedTuple):
    """The numbers of tokens, of tokens with window slots, and of recurrent states to evict."""

    num_tokens: int
    swa_num_tokens: int = 0
    mamba_num: int = 0


class EvictResult(NamedTuple):
    """The numbers of evicted tokens, tokens with window slots, and recurrent states."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0
