"""Recurrent layers of a transformers `Cache`: states that come from elsewhere when a layer first asks for them.

A recurrent layer continues from what it kept: the last inputs of its convolution and a temporal state, `[B, ...]` each.
Here both are copies that one forward pass may change as it likes; whoever runs the pass takes the results. So a pass
that fails half-way leaves the states it came from as they were.

Owns the copies of one pass. May import transformers, torch and the device tier's records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from hicache.device.mamba import MambaState


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped here
    """One recurrent layer of one forward pass. Called by the model, on the scheduler thread.

    `source`: gives the state that all tokens before the pass have left, as tensors of our own, `[B, ...]`, with one
    convolution window; None where the sequences begin. It is called once, when the layer's turn has come.
    """

    def __init__(self, source: Callable[[], MambaState] | None) -> None:
        super().__init__()
        self._source = source
        self.has_previous_state[0] = source is not None

    @property
    def state(self) -> MambaState | None:
        """What the pass has left; None where the model kept less than a convolution window and a temporal state."""
        conv, temporal = self.conv_states[0], self.recurrent_states[0]
        return None if conv is None or temporal is None else MambaState([conv], temporal)

    def fetch(self) -> None:
        """Take the state from its source, unless that was done."""
        if self._source is None:
            return
        state, self._source = self._source(), None
        (conv,) = state.conv
        self.conv_states[0], self.recurrent_states[0] = conv, state.temporal
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.conv_kernel_size[0] = conv.shape[-1]
        self.dtype, self.device = conv.dtype, conv.device

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the library's: returns the inputs that the convolution sees, those before the pass in front."""
        self.fetch()
        inputs: torch.Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.fetch()
        updated: torch.Tensor = super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return updated


class StateCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A `Cache` whose recurrent layers are `StateLayer`s: a layer's state is fetched when the model asks for it."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self._fetch(layer_idx)
        state: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self._fetch(layer_idx)
        state: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def _fetch(self, layer_idx: int) -> None:
        layer = self.layers[layer_idx]
        if isinstance(layer, StateLayer):
            layer.fetch()
