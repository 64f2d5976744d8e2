"""The pool of recurrent states: a convolution window and a temporal state for each request and Mamba layer.

    state 0           for padding, never allocated
    states [1, size]  each free or allocated, never both

The pool owns its tensors and the list of free states. The request table allocates states from the pool itself, whereas
slots of tokens have a separate allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hicache.config.environment import debug_checks, kernel_choice, mamba_ssm_dtype
from hicache.device.base import CpuCopy, LayerWaiter, SlotSpace, rows_from_cpu, rows_to_cpu
from hicache.device.mapped import ascending
from hicache.device.memory import allocate_zeros, allocation_region
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError
from hicache.kernels.mamba import clear_states, copy_states
from hicache.layout import BufferSpec, PoolLayout
from hicache.tiers import MAMBA


@dataclass(frozen=True, kw_only=True)
class Mamba2StateShape:
    """Shapes of one layer's state of one request on one rank: convolution windows, and (heads, dim, state)."""

    conv: tuple[tuple[int, ...], ...]
    temporal: tuple[int, ...]

    @staticmethod
    def create(
        tp_world_size: int,
        intermediate_size: int,
        n_groups: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        conv_kernel: int,
    ) -> Mamba2StateShape:
        """Compute the shapes on one of `tp_world_size` ranks. If several ranks have heads of one group, each of these
        ranks stores the group.

        The convolution window stores the last conv_kernel - 1 inputs of x, B and C, which have intermediate_size + 2 *
        n_groups * state_size channels. Raises ConfigError unless heads, channels and groups split evenly over the
        ranks.
        """
        if intermediate_size % tp_world_size or num_heads % tp_world_size:
            raise ConfigError(
                f"intermediate_size={intermediate_size} and num_heads={num_heads} do not split evenly over "
                f"tp_world_size={tp_world_size} ranks"
            )
        if n_groups % tp_world_size and tp_world_size % n_groups:
            raise ConfigError(f"n_groups={n_groups} and tp_world_size={tp_world_size}: one must divide the other")
        if conv_kernel < 2:
            raise ConfigError(f"conv_kernel={conv_kernel} leaves no window; it must be at least 2")
        groups = max(1, n_groups // tp_world_size)
        channels = intermediate_size // tp_world_size + 2 * groups * state_size
        temporal = (num_heads // tp_world_size, head_dim, state_size)
        return Mamba2StateShape(conv=((channels, conv_kernel - 1),), temporal=temporal)


@dataclass(frozen=True)
class Mamba2CacheParams:
    """Contents of a Mamba pool: the shapes, the global ids of the layers, and the dtypes.

    The default of `temporal_dtype` is the environment variable HICACHE_MAMBA_SSM_DTYPE, or float32 if this variable is
    unset.
    """

    shape: Mamba2StateShape
    layers: Sequence[int]
    temporal_dtype: torch.dtype = field(default_factory=mamba_ssm_dtype)
    conv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", ascending(self.layers, "layers"))

    @property
    def layout(self) -> PoolLayout:
        """Return a layout with rows per request: conv0, conv1, ..., temporal in each layer. A page is one state."""
        layers = tuple(self.layers)
        conv = [
            BufferSpec(f"conv{i}", self.conv_dtype, shape, "request", layers) for i, shape in enumerate(self.shape.conv)
        ]
        temporal = BufferSpec("temporal", self.temporal_dtype, self.shape.temporal, "request", layers)
        return PoolLayout((*conv, temporal), 1)


@dataclass(frozen=True)
class MambaState:
    """Tensors of all layers, `[layers, states, ...]`, or views of one layer, `[states, ...]`."""

    conv: list[torch.Tensor]
    temporal: torch.Tensor

    def at_layer(self, index: int) -> MambaState:
        return MambaState([x[index] for x in self.conv], self.temporal[index])


@dataclass(frozen=True)
class SpeculativeMambaState(MambaState):
    """A `MambaState` that also has the states after each draft token, `[..., drafts, ...]`. They are restored if a
    draft is rejected."""

    intermediate_ssm: torch.Tensor
    intermediate_conv_window: list[torch.Tensor]

    def at_layer(self, index: int) -> SpeculativeMambaState:
        return SpeculativeMambaState(
            [x[index] for x in self.conv],
            self.temporal[index],
            self.intermediate_ssm[index],
            [x[index] for x in self.intermediate_conv_window],
        )


class MambaPool:
    """A pool of `size` states and state 0 for padding. The scheduler thread calls it; the forward pass also calls
    `mamba2_layer_cache`.

    Ids are int64 tensors on `device`. `free_slots` lists the free states; the first is allocated next. Each change
    replaces the tensor `free_slots` and never writes to it in place. Only `check` and CPU copies wait for the device,
    and with HICACHE_DEBUG=1 also the checks of frees and copies. Kernels run on the current stream, which should be the
    stream that uses the states. Only callers with SGLang's interface use speculative states and CPU copies.
    """

    def __init__(
        self,
        size: int,
        cache_params: Mamba2CacheParams,
        device: str | torch.device,
        spec_state_size: int = 0,
        speculative_num_draft_tokens: int | None = None,
        enable_memory_saver: bool = False,
    ) -> None:
        """Allocate the states. With `speculative_num_draft_tokens`, also allocate draft buffers for `spec_state_size`
        requests, or for `size` requests if that is 0."""
        if size < 1 or spec_state_size < 0 or (speculative_num_draft_tokens or 1) < 1:
            raise ConfigError(
                f"size={size}, spec_state_size={spec_state_size}, "
                f"speculative_num_draft_tokens={speculative_num_draft_tokens}: raise mamba_size to at least 1"
            )
        self.size = size
        self.cache_params = cache_params
        self.device = torch.device(device)
        self.layers = tuple(cache_params.layers)
        self._dense_ids = {layer_id: dense for dense, layer_id in enumerate(self.layers)}
        self._kernels = kernel_choice(self.device)
        self._check_calls = self.device.type == "cpu" or debug_checks()
        self.layer_transfer_counter: LayerWaiter | None = None
        with allocation_region(enable_memory_saver):
            self.mamba_cache = self._allocate(spec_state_size or size, speculative_num_draft_tokens)
        self._tensors = (*self.mamba_cache.conv, self.mamba_cache.temporal)
        self.free_slots: torch.Tensor
        self._owned: set[int] | None  # the allocated states; None if frees and copies are not checked
        self.mem_usage = sum(x.nbytes for x in self._all_tensors()) / (1 << 30)
        self.clear()

    @cached_property
    def layout(self) -> PoolLayout:
        return self.cache_params.layout

    @cached_property
    def slot_spaces(self) -> tuple[SlotSpace, ...]:
        """One slot space, whose slots are states and whose pages have one slot."""
        return (SlotSpace(MAMBA, self.layout, self.size + 1, self.device, self.layer_buffers),)

    def layer_buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Return the conv windows and the temporal state of a layer, given its global id: `[states, ...row]` in the
        layout's order."""
        dense = self._dense_id(layer_id)
        return tuple(x[dense] for x in self._tensors)

    def mamba2_layer_cache(self, layer_id: int) -> MambaState:
        """Return views of one layer, given its global id, after waiting until the layer is loaded. A ShapeError lists
        the Mamba layers."""
        dense = self._dense_id(layer_id)
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(dense)
        return self.mamba_cache.at_layer(dense)

    def register_layer_transfer_counter(self, counter: LayerWaiter) -> None:
        """Make `mamba2_layer_cache`, copies and moves wait for layers with this transfer counter. Its `wait_until` gets
        the dense index of a layer."""
        self.layer_transfer_counter = counter

    def compile(self) -> None:
        """Compile the kernels that clear and copy any number of states; clears state 0."""
        sink = torch.zeros(1, dtype=torch.int64, device=self.device)
        clear_states(self._tensors, sink, self._kernels)
        copy_states(self._tensors, sink, sink, self._kernels)

    def available_size(self) -> int:
        """Return the number of states that can be allocated now."""
        return self.free_slots.numel()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate `need_size` zeroed states. Returns None, without any change, if too few states are free."""
        slots = self._take(need_size)
        if slots is not None:
            clear_states(self._tensors, slots, self._kernels)
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        """Free states. The caller may change `free_index` afterwards. For CPU tensors or with HICACHE_DEBUG=1, raises
        DoubleFree, before any change, for a state that is not allocated."""
        slots = free_index.reshape(-1).to(torch.int64)
        if not slots.numel():
            return
        if self._owned is not None:
            self._disown(slots.tolist(), self._owned)
        self.free_slots = torch.cat((self.free_slots, slots))

    def fork_from(self, src_index: torch.Tensor) -> torch.Tensor | None:
        """Allocate a copy of each state in `src_index` (int64, any shape). Returns the ids of the copies, or None if
        too few states are free."""
        src = src_index.reshape(-1)
        slots = self._take(src.numel())
        if slots is not None:
            self._copy(src, slots)
        return slots

    def copy_from(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """Copy state `src_index[i]` to `dst_index[i]` for each i. For CPU tensors or with HICACHE_DEBUG=1, raises
        InvariantError if a target also occurs in another pair; this does not apply to the target state 0 (padding)."""
        src, dst = src_index.reshape(-1), dst_index.reshape(-1)
        if src.numel() != dst.numel():
            raise ShapeError(f"{src.numel()} source states for {dst.numel()} target states")
        if self._check_calls and src.numel() > 1:
            self._check_copy(src, dst)
        self._copy(src, dst)

    def clear(self) -> None:
        """Free all states."""
        self.free_slots = torch.arange(1, self.size + 1, dtype=torch.int64, device=self.device)
        self._owned = set() if self._check_calls else None

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy:
        """Copy states `indices` to the CPU as `[layer][chunk](buffers)` in the layout's order, in pinned memory on
        CUDA. Waits for the device."""
        self._wait_all()
        return rows_to_cpu([self.layer_buffers(layer_id) for layer_id in self.layers], indices.reshape(-1))

    def load_cpu_copy(self, mamba_cache_cpu: CpuCopy, indices: torch.Tensor) -> None:
        """Write a copy made by `get_cpu_copy` to the same number of states, possibly other states. Waits for the
        device."""
        rows_from_cpu(mamba_cache_cpu, [self.layer_buffers(i) for i in self.layers], indices.reshape(-1))

    def check(self) -> None:
        """Raise InvariantError with all violations. Violations are a free state that is out of range, listed twice, or
        also allocated."""
        violations = []
        free = self.free_slots.cpu()
        outside = free[(free < 1) | (free > self.size)]
        if outside.numel():
            violations.append(f"free states {outside[:8].tolist()} are outside 1..{self.size}")
        ids, counts = free.unique(return_counts=True)
        if (counts > 1).any():
            violations.append(f"states {ids[counts > 1][:8].tolist()} are free more than once")
        if self._owned is not None and not outside.numel():
            both = sorted(self._owned.intersection(ids.tolist()))
            if both:
                violations.append(f"states {both[:8]} are free and allocated")
            if len(self._owned) + ids.numel() != self.size:
                violations.append(f"{ids.numel()} free and {len(self._owned)} allocated of {self.size} states")
        if violations:
            raise InvariantError("MambaPool", violations)

    def _take(self, num_states: int) -> torch.Tensor | None:
        if num_states < 0:
            raise ShapeError(f"{num_states} states were requested; request 0 or more")
        if num_states > self.free_slots.numel():
            return None
        slots = self.free_slots[:num_states].clone()
        self.free_slots = self.free_slots[num_states:]
        if self._owned is not None:
            self._owned.update(slots.tolist())
        return slots

    def _copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._wait_all()
        copy_states(self._tensors, src, dst, self._kernels)

    def _check_copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        other = ~torch.eye(len(src), dtype=torch.bool, device=src.device)
        crossing = (((src[:, None] == dst) | (dst[:, None] == dst)) & other).any(0) & (dst != 0)
        if crossing.any():
            raise InvariantError(
                "MambaPool", [f"states {dst[crossing].tolist()} are written, and read or written by another pair"]
            )

    def _disown(self, states: list[int], owned: set[int]) -> None:
        bad = [state for state in states if state not in owned]
        if bad or len(set(states)) != len(states):
            raise DoubleFree(
                f"states {(bad or states)[:8]} were freed and are not allocated, or are named twice; states are "
                f"1..{self.size}"
            )
        owned.difference_update(states)

    def _wait_all(self) -> None:
        if self.layer_transfer_counter is not None:
            for dense in range(len(self.layers)):
                self.layer_transfer_counter.wait_until(dense)

    def _dense_id(self, layer_id: int) -> int:
        if layer_id not in self._dense_ids:
            raise ShapeError(f"layer_id={layer_id} is not one of the Mamba layers: {list(self.layers)}")
        return self._dense_ids[layer_id]

    def _allocate(self, spec_states: int, drafts: int | None) -> MambaState:
        shape, num_layers = self.cache_params.shape, len(self.layers)

        def zeros(rows: Sequence[tuple[int, ...]], dtype: torch.dtype, *leading: int) -> list[torch.Tensor]:
            return allocate_zeros([(num_layers, *leading, *row) for row in rows], dtype, self.device, "mamba_size")

        conv = zeros(shape.conv, self.cache_params.conv_dtype, self.size + 1)
        (temporal,) = zeros([shape.temporal], self.cache_params.temporal_dtype, self.size + 1)
        if drafts is None:
            return MambaState(conv, temporal)
        (ssm,) = zeros([shape.temporal], self.cache_params.temporal_dtype, spec_states + 1, drafts)
        window = zeros(shape.conv, self.cache_params.conv_dtype, spec_states + 1, drafts)
        return SpeculativeMambaState(conv, temporal, ssm, window)

    def _all_tensors(self) -> tuple[torch.Tensor, ...]:
        cache = self.mamba_cache
        if isinstance(cache, SpeculativeMambaState):
            return (*self._tensors, cache.intermediate_ssm, *cache.intermediate_conv_window)
        return self._tensors
