"""SGLang 0.5.23's own tree, allocators and device pools over the linker, filled with bytes that follow from the tokens.

Built by the fixtures of SGLang's wheel. What a forward would do is done by hand: slots are filled before an insert, and
read layer by layer through the pools' getters, which wait for the linker's counter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from waiting import BOUND_S, eventually

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
PAGE = 4
SMALL = CacheConfig(
    page_size=PAGE,
    components=(FULL,),
    num_layers=4,
    full_attention_layer_ids=(1, 3),
    kv_size=256,
    enable_mamba_extra_buffer=True,
    mamba_cache_size=40,
    head_num=2,
    head_dim=16,
)
CONFIGS = {
    "full": SMALL,
    "swa": dataclasses.replace(SMALL, components=(FULL, SWA), sliding_window_size=2 * PAGE),
    "mamba": dataclasses.replace(SMALL, components=(FULL, MAMBA)),
    "swa_mamba": dataclasses.replace(SMALL, components=(FULL, SWA, MAMBA), sliding_window_size=2 * PAGE),
}
DYNAMIC = {"linker": "HiCacheLinker", "linker_module_path": "hicache.integrations.sglang"}


def bits_of(seed: str, like: torch.Tensor) -> torch.Tensor:
    """Bytes that follow from `seed`, in the shape and dtype of `like`."""
    data = hashlib.shake_128(seed.encode()).digest(like.numel() * like.element_size())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).view(like.shape)


@dataclasses.dataclass
class Admitted:
    """A request between admission and its end: `device_pages` were matched on the device, `loaded` slots come from the
    linker, and with them the state that the request now owns."""

    request: Any
    tokens: list[int]
    lock: Any
    device_slots: torch.Tensor
    loaded: torch.Tensor
    restorable: int

    @property
    def covered(self) -> list[int]:
        """The tokens whose keys and values it has."""
        return self.tokens[: len(self.device_slots) + len(self.loaded)]


class LinkerCase(UnifiedRadixCacheFixtures):
    """One server: a tree with its linker, whose store is at `path`."""

    def __init__(
        self, cfg: CacheConfig, store: Path, device: str = "cpu", *, draft: bool = False, **settings: Any
    ) -> None:
        """On CUDA forwards run on a stream of their own, as in SGLang's overlapped schedule. `draft`: a draft model of
        one layer takes the same slots."""
        self.cfg, self.device = cfg, device
        self.forward_stream = torch.cuda.Stream() if device == "cuda" else None
        fixtures.get_device = lambda: device
        self._contexts = contextlib.ExitStack()
        self._contexts.enter_context(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
        self._no_slots = torch.empty(0, dtype=torch.int64, device=device)
        self.cache, self.allocator, self.rows = fixtures.build_fixture(cfg)
        params = self.cache.cache_init_params
        self._draft = self._draft_pool() if draft else None
        if self._draft is not None:
            params.sidecar_draft_device_pools = (self._draft,)
        waits = {"lookup_wait_s": BOUND_S, "load_wait_s": BOUND_S}  # no verdict depends on time
        extra = {"path": str(store), "budget": "64MiB", "host_bytes": "4MiB", **waits, **settings}
        self.linker = create_unified_cache_linker(
            ServerArgs(model_path="dummy", page_size=cfg.page_size),
            params,
            backend="dynamic",
            config={**DYNAMIC, "linker_extra_config": extra},
            components=set(self.cache.components),
            forward_stream=self.forward_stream,
        )
        self.cache.init_cache_linker(self.linker)
        self.pool = self.allocator.get_kvcache()
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def close(self) -> None:
        self.cache.linker.close()
        self._contexts.close()

    def _draft_pool(self) -> MHATokenToKVPool:
        about = {"size": self.cfg.kv_size, "page_size": self.cfg.page_size, "dtype": self.cfg.dtype, "layer_num": 1}
        return MHATokenToKVPool(**about, head_num=1, head_dim=16, device=self.device, enable_memory_saver=False)

    # What a forward does

    def layers(self) -> Iterator[tuple[int, str]]:
        """Each layer and the component that it belongs to. The draft model runs last."""
        for layer in range(self.cfg.num_layers):
            is_full = layer in self.cfg.full_attention_layer_ids or self.cfg.components == (FULL,)
            if is_full:
                yield layer, "kv"
            elif SWA in self.cfg.components:
                yield layer, "swa"
            if not is_full and MAMBA in self.cfg.components:
                yield layer, "mamba"
        if self._draft is not None:
            yield 0, "draft"

    def buffers(self, layer: int, component: str) -> list[torch.Tensor]:
        """What a forward reads in a layer, after waiting for it, rows first."""
        if component == "draft":
            return [self._draft.k_buffer[layer], self._draft.v_buffer[layer]]
        if component == "mamba":
            state = self.rows.mamba2_layer_cache(layer)
            return [state.temporal, *state.conv]
        return list(self.pool.get_kv_buffer(layer))

    def slots(self, component: str, full: torch.Tensor) -> torch.Tensor:
        return self.allocator.full_to_swa_index_mapping[full] if component == "swa" else full

    def fill(self, tokens: Sequence[int], full: torch.Tensor, state: torch.Tensor | None) -> None:
        """Write what the tokens' keys and values would be, and the state at their end."""
        self.linker.layer_done_counter.set_consumer(-1)
        with self._on_forward_stream():
            for _, _, buffer, rows, seed in self._rows(tokens, 0, full, state, all_swa=True):
                buffer[rows] = bits_of(seed, buffer[rows]).to(self.device)

    def differences(
        self, tokens: Sequence[int], first_page: int, full: torch.Tensor, state: torch.Tensor | None
    ) -> list[str]:
        """Where the slots of the tokens from `first_page` on hold other bytes, layer after layer."""
        found = []
        with self._on_forward_stream():
            for layer, component, buffer, rows, seed in self._rows(tokens, first_page, full, state):
                read = buffer[rows].cpu()
                if not torch.equal(read.view(torch.uint8), bits_of(seed, read).view(torch.uint8)):
                    found.append(f"layer {layer} {component} rows {rows.tolist()}")
        return found

    @contextlib.contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        if self.forward_stream is None:
            yield
            return
        self.forward_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.forward_stream):
            torch.cuda._sleep(10_000_000)  # who does not wait for the forward comes first
            yield

    def _rows(
        self,
        tokens: Sequence[int],
        first_page: int,
        full: torch.Tensor,
        state: torch.Tensor | None,
        all_swa: bool = False,
    ) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor, str]]:
        """Of each layer, in order: every page of the tail (of SWA, those in the window) and the state at the end."""
        size, num_pages = self.cfg.page_size, len(tokens) // self.cfg.page_size
        # What a page holds follows from all tokens up to its end.
        names = [hashlib.sha256(repr(tuple(tokens[: (i + 1) * size])).encode()).hexdigest() for i in range(num_pages)]
        for layer, component in self.layers():
            buffers = self.buffers(layer, component)
            if component == "mamba":
                places = [] if state is None else [(state.reshape(-1), names[-1])]
            else:
                start = first_page
                if component == "swa" and not all_swa:
                    start = max(first_page, num_pages - -(-(self.cfg.sliding_window_size or 0) // size))
                pages = range(start, num_pages)
                slots = self.slots(component, full)
                places = [(slots[(page - first_page) * size :][:size], names[page]) for page in pages]
            for rows, name in places:
                for index, buffer in enumerate(buffers):
                    yield layer, component, buffer, rows, f"{name}/{component}/{layer}/{index}"

    # What a scheduler does

    def insert(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, of which nothing is cached, and leave it in the tree. Its nodes are offloaded."""
        full = self._alloc(self.allocator, len(tokens))
        if full is None:
            self.settle()  # offloads lock their nodes
            self.evict()
            full = self._alloc(self.allocator, len(tokens))
        assert full is not None, "the prompt is larger than the device"
        params = InsertParams(key=RadixKey(array("q", tokens)), value=full)
        request = self._make_req(self.rows)
        if MAMBA in self.cfg.components:
            params.mamba_value = request.kv.mamba_pool_idx.unsqueeze(0)
        self.fill(tokens, full, params.mamba_value)
        result = self.cache.insert(params)
        self._release(request, owns_state=result.mamba_exist)

    def settle(self) -> None:
        """Steps of the scheduler until all offloads have ended, and the disk has what the host has."""

        def is_settled() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads and self.linker.is_idle

        eventually(is_settled, self.linker.describe)

    def evict(self) -> None:
        """Nothing stays on the device."""
        everything = EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20, mamba_num=1 << 20)
        self.cache.evict(everything)

    def admit(self, tokens: Sequence[int]) -> Admitted:
        """Match a prompt, and queue the load of what the linker has of it."""
        request = self._make_req(self.rows)
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)), req=request))
        self._apply_match_to_req(request, match)
        lock = self.cache.inc_lock_ref(request.last_node).to_dec_params()
        root = self.cache.root_node_handle()
        on_device = self.cache.tree_core.collect_full_device_indices(request.last_node, root)
        if match.host_hit_length:
            load = InitLoadBackParams(request.best_match_node, match.host_hit_length, req=request)
            self.cache.init_load_back(load)
        loaded = self.cache.linker.private_load_indices.get(request.rid, self._no_slots)
        return Admitted(request, list(tokens), lock, on_device, loaded, match.host_hit_length)

    def forward(self, batch: Sequence[Admitted]) -> tuple[list[str], list[Admitted]]:
        """Run the forward of a batch: what its layers read wrong, and the requests that SGLang aborts."""
        index = self.cache.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        found = []
        for each in batch:
            first_page = len(each.device_slots) // self.cfg.page_size
            state = each.request.kv.mamba_pool_idx if MAMBA in self.cfg.components and len(each.loaded) else None
            found += self.differences(each.covered, first_page, each.loaded, state)
        failed = self.cache.finish_external_linker_loads([each.request for each in batch])
        return found, [each for each in batch if each.request in failed]

    def end(self, admitted: Admitted, keep: bool = True) -> None:
        """The request ends; with `keep` what it loaded joins the tree, else its slots are free."""
        request, loaded = admitted.request, admitted.loaded
        owned = True
        if keep and len(loaded):
            key, value = RadixKey(array("q", admitted.covered)), torch.cat([admitted.device_slots, loaded])
            params = InsertParams(key=key, value=value, prev_prefix_len=len(admitted.device_slots))
            if SWA in self.cfg.components:
                params.set_evicted_seqlen(SWA, request.kv.get_evicted_seqlen(SWA))
            if MAMBA in self.cfg.components:
                params.mamba_value = request.kv.mamba_pool_idx.unsqueeze(0).clone()
            owned = self.cache.insert(params).mamba_exist
        elif len(loaded):
            self.allocator.free(loaded)
        self.cache.dec_lock_ref(request.last_node, admitted.lock)
        self._release(request, owns_state=owned)

    def _release(self, request: Any, owns_state: bool) -> None:
        if MAMBA in self.cfg.components:
            if owns_state:
                self.rows.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(0))
            if request.kv.mamba_ping_pong_track_buffer is not None:
                self.rows.mamba_allocator.free(request.kv.mamba_ping_pong_track_buffer)
        self.rows.free_slots.append(request.kv.req_pool_idx)
