"""A model of 16-bit weights that computes in float32 for a while, in the memory of one more layer.

Every 16-bit weight is a float32 number, so the widened model is the same function without the rounding between its
layers. A copy of all weights may not fit; so a decoder layer is widened when its turn comes and narrowed after it.

May import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def float32_weights(model: nn.Module) -> Iterator[None]:
    """Have `model` compute in float32, without the shorter multiplication (TF32) that may be switched on.

    What stands outside of lists of layers (embeddings, the head) is widened for the whole time, a layer for its own
    forward. Weights are the very same tensors afterwards. The model must not be in use.
    """
    outside, layers = _split(model)
    apart = _Widened(outside)
    repeated = [_Widened(_tensors(layer)) for layer in layers]
    with ExitStack() as stack:
        stack.enter_context(_whole_mantissa())
        stack.callback(apart.narrow)
        apart.widen()
        for layer, tensors in zip(layers, repeated, strict=True):
            stack.callback(tensors.narrow)
            stack.enter_context(_hook(layer.register_forward_pre_hook(tensors.widen, prepend=True)))
            stack.enter_context(_hook(layer.register_forward_hook(tensors.narrow, always_call=True)))
        yield


@contextmanager
def _whole_mantissa() -> Iterator[None]:
    """Multiply float32 as it is, where CUDA may be set to shorten it to TF32."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    settings: list[tuple[Any, str, Any]] = [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    if getattr(matmul, "fp32_precision", None) is not None:
        # Torch from 2.9 on has these names, and raises where both these and the older ones are used.
        settings = [(matmul, "fp32_precision", "ieee"), (cudnn.conv, "fp32_precision", "ieee")]
    with ExitStack() as stack:
        for owner, name, value in settings:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


class _Widened:
    """Tensors that are float32 between `widen` and `narrow`; each may be called twice. The arguments are a hook's."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._narrow: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widen(self, *_: Any) -> None:
        for tensor in self._tensors:
            if tensor.dtype in _NARROW:
                self._narrow.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def narrow(self, *_: Any) -> None:
        while self._narrow:
            tensor, data = self._narrow.pop()
            tensor.data = data


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _split(model: nn.Module) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Tensors outside of lists of modules, and the modules of the outermost such lists."""
    outside = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
    layers: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            layers.extend(child)
            continue
        tensors, below = _split(child)
        outside.extend(tensors)
        layers.extend(below)
    return outside, layers


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
