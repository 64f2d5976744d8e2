"""A model with 16-bit weights that computes in float32. The model's results equal those of a float32 copy, and the
model only needs the additional memory of one layer."""

from __future__ import annotations

import copy

import pytest
import torch

from family_case import tiny_family
from hicache.serving.widen import float32_weights


@pytest.mark.parametrize(
    ("row", "dtype"),
    [("gpt2", torch.float16), ("qwen3_next", torch.bfloat16), ("bamba", torch.float16), ("gpt_oss", torch.bfloat16)],
)
@torch.inference_mode()
def test_a_widened_model_is_its_float32_copy(row: str, dtype: torch.dtype) -> None:
    """Logits equal those of a copy with every weight in float32. At most one layer is in float32 at a time."""
    model = tiny_family(row).to(dtype)
    ids = torch.arange(12, device=model.device)[None]
    expected = copy.deepcopy(model).float()(input_ids=ids).logits
    (layers,) = [child for _, child in model.base_model.named_children() if isinstance(child, torch.nn.ModuleList)]
    wide: list[int] = []

    def count(*_: object) -> None:
        wide.append(sum(any(weight.dtype == torch.float32 for weight in layer.parameters()) for layer in layers))

    narrow_already = sum(any(weight.dtype == torch.float32 for weight in layer.parameters()) for layer in layers)
    with float32_weights(model):
        for layer in layers:
            layer.register_forward_pre_hook(count)
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert len(wide) == len(layers) and max(wide) <= narrow_already + 1
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_a_float32_model_is_left_alone() -> None:
    """Float32 weights are not replaced. If a forward raises, the weights of its model are restored."""
    model = tiny_family("llama")
    pointers = [weight.data_ptr() for weight in model.parameters()]
    with float32_weights(model):
        assert [weight.data_ptr() for weight in model.parameters()] == pointers
    narrow = tiny_family("llama").to(torch.bfloat16)
    pointers = [weight.data_ptr() for weight in narrow.parameters()]

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    narrow.model.layers[1].mlp.forward = broken
    with pytest.raises(ZeroDivisionError), float32_weights(narrow):
        narrow(input_ids=torch.tensor([[1]], device=narrow.device))
    assert [weight.data_ptr() for weight in narrow.parameters()] == pointers


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_precision_of_multiplication_is_as_before(precision: str) -> None:
    """TF32, which rounds float32 factors on CUDA, is off inside the context, and has its previous setting
    afterwards."""
    before, matmul = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    torch.set_float32_matmul_precision(precision)
    try:
        with float32_weights(tiny_family("llama")):
            assert getattr(matmul, "fp32_precision", None) == "ieee" or not matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
