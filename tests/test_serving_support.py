"""Which models the runner takes, and how it names what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from serving_case import tiny_llama

from hicache.errors import UnsupportedModel
from hicache.layout import ModelGeometry
from hicache.serving.support import attention_mask, check_supported

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _build(config: Any) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_geometry_is_what_the_layers_store(kernel: str) -> None:
    """Layers, KV heads and head size come from what the model hands to its cache."""
    model = tiny_llama(layers=3, heads=4, kv_heads=2, kernel=kernel)
    assert check_supported(model) == ModelGeometry(layer_num=3, head_num=2, head_dim=16)


@pytest.mark.parametrize(
    "config",
    [
        hf.Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
        hf.Qwen3Config(**SMALL),
        hf.MistralConfig(**SMALL, sliding_window=None),
        hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ],
    ids=lambda config: config.model_type,
)
def test_other_plain_attention_is_supported(config: Any) -> None:
    """Support does not depend on the model's name: any architecture of plain attention passes."""
    geometry = check_supported(_build(config))
    assert (geometry.layer_num, geometry.head_dim) == (2, 8)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
            "linear_attention|recurrent",
        ),
        (
            hf.Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
            "sliding_",
        ),
        (hf.MistralConfig(**SMALL, sliding_window=16), "sliding_attention"),
        (
            hf.DeepseekV3Config(
                **{**SMALL, "num_key_value_heads": 4, "head_dim": 8},
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=4,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                first_k_dense_replace=2,
                n_group=1,
                topk_group=1,
            ),
            "latent attention",
        ),
        (
            hf.LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type=dynamic",
        ),
        (hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "Bloom"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_layers_are_refused_by_name(config: Any, names: str) -> None:
    """A model with other layers than plain attention is refused in one line that says which and what would do."""
    with pytest.raises(UnsupportedModel, match=names) as caught:
        check_supported(_build(config))
    assert "full attention in every layer" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attention_that_depends_on_more_than_the_cache_is_refused() -> None:
    """A model that looks plain but whose results change with how its input is cut is refused by comparing values."""
    model = tiny_llama()
    plain = model.model.layers[0].self_attn.forward

    def with_input_length(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        output, weights = plain(hidden_states=hidden_states, **kwargs)
        return output * hidden_states.shape[1], weights

    model.model.layers[0].self_attn.forward = with_input_length
    with pytest.raises(UnsupportedModel, match="other results over a cached prefix"):
        check_supported(model)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_mask_hides_what_comes_later(kernel: str) -> None:
    """Query at position p sees keys [0, p] and nothing else, in the form that each kernel wants."""
    positions = torch.tensor([[0, 3], [5, 2]])
    mask = attention_mask(positions, 6, kernel, torch.float32)
    assert mask.shape == (2, 1, 2, 6)
    for b in range(2):
        for q in range(2):
            seen = [key <= positions[b, q].item() for key in range(6)]
            row = mask[b, 0, q].tolist()
            assert row == (seen if kernel == "sdpa" else [0.0 if s else torch.finfo(torch.float32).min for s in seen])
