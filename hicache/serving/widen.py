"""Float32 arithmetic for a model with 16-bit weights, which needs additional memory for only one layer.

Every 16-bit weight is also a float32 number, so the widened model computes the same function, but without 16-bit
rounding between layers. A float32 copy of all weights may not fit in memory, so each decoder layer is widened before
its forward and restored after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def float32_weights(model: nn.Module) -> Iterator[None]:
    """Within the `with` block, `model` computes in float32 without TF32.

    Tensors outside of lists of layers (embeddings, the head) are widened all the time. The tensors of a layer are
    widened only during this layer's forward. After the `with` block, the model has its original tensors. No other code
    may use the model within the block.
    """
    outside, layers = _split(model)
    widened = _WidenedTensors(outside)
    with ExitStack() as stack:
        stack.enter_context(_without_tf32())
        stack.callback(widened.restore)
        widened.widen()
        for layer in layers:
            tensors = _WidenedTensors(_tensors(layer))
            stack.callback(tensors.restore)
            stack.callback(layer.register_forward_pre_hook(tensors.widen, prepend=True).remove)
            stack.callback(layer.register_forward_hook(tensors.restore, always_call=True).remove)
        yield


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Switch off TF32, because it rounds the factors of float32 products on CUDA."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    settings: list[tuple[Any, str, Any]] = [(matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    if getattr(matmul, "fp32_precision", None) is not None:
        # torch 2.9 and later have these names, and raise if a process uses both these and the older names.
        settings = [(matmul, "fp32_precision", "ieee"), (cudnn.conv, "fp32_precision", "ieee")]
    with ExitStack() as stack:
        for owner, name, value in settings:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


class _WidenedTensors:
    """Tensors that are float32 between `widen` and `restore`. Both methods are idempotent. They accept and ignore the
    arguments of a forward hook."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._originals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widen(self, *_: Any) -> None:
        for tensor in self._tensors:
            if tensor.dtype in (torch.bfloat16, torch.float16):
                self._originals.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def restore(self, *_: Any) -> None:
        while self._originals:
            tensor, data = self._originals.pop()
            tensor.data = data


def _split(model: nn.Module) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Return the tensors outside of every `ModuleList`, and the modules in the outermost `ModuleList`s."""
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
