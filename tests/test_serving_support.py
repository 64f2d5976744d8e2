"""Which models the runner takes, and how it names what it does not take."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from hybrid_case import tiny_gemma, tiny_mistral, tiny_qwen3_next, tiny_qwen3_window
from serving_case import tiny_llama

from hicache.errors import ConfigError, UnsupportedModel
from hicache.layout import ModelGeometry, StateGeometry
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


@pytest.mark.parametrize("window", [1, 2, 3, 16, 4096])
def test_windows_are_found(window: int) -> None:
    """Kinds of layers and the window come from the configuration, which is as before afterwards."""
    heads: dict[str, Any] = {"head_num": 2, "head_dim": 16, "window": window}
    for model, kinds in (
        (tiny_mistral(window), ("window", "window", "window")),
        (tiny_gemma(window, version=2), ("window", "full", "window", "full")),
        (tiny_gemma(window), ("window", "window", "full", "window")),
        (tiny_qwen3_window(window), ("full", "full", "window", "window")),
    ):
        before = model.config.to_dict()
        assert check_supported(model) == ModelGeometry(len(kinds), layer_kinds=kinds, **heads)
        assert model.config.to_dict() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent_layers_are_found(dtype: torch.dtype) -> None:
    """Shapes and dtypes of a state are those that the layers keep: a whole convolution window, a temporal part."""
    assert check_supported(tiny_qwen3_next().to(dtype)) == ModelGeometry(
        layer_num=4,
        head_num=2,
        head_dim=16,
        layer_kinds=("recurrent", "recurrent", "recurrent", "full"),
        state=StateGeometry(((2 * 2 * 8 + 4 * 8, 4),), (4, 8, 8), dtype, torch.float32),
    )


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
            "recurrent layers alone",
        ),
        (hf.Lfm2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, full_attn_idxs=[1]), "type conv"),
        (
            hf.RecurrentGemmaConfig(**{**SMALL, "num_hidden_layers": 3}, attention_window_size=8),
            "sliding_attention beside linear_attention",
        ),
        (hf.Llama4TextConfig(**SMALL), "chunked_attention"),
        (
            hf.Qwen3Config(**SMALL, sliding_window=None, layer_types=["full_attention", "sliding_attention"]),
            "without a sliding_window",
        ),
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
        # Its kernels start from nothing where several tokens follow a state.
        (
            hf.JambaConfig(
                **{k: v for k, v in SMALL.items() if k != "head_dim"},
                attn_layer_period=2,
                attn_layer_offset=1,
                mamba_d_state=4,
                num_experts=2,
                num_experts_per_tok=1,
                initializer_range=0.2,
            ),
            "other results over a cached prefix",
        ),
        (
            hf.Gemma3TextConfig(**SMALL, sliding_window=8, use_bidirectional_attention=True, initializer_range=0.2),
            "other results over a cached prefix",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_layers_are_refused_by_name(config: Any, names: str) -> None:
    """A model with layers that the runner does not know is refused in one line that says which and what would do."""
    before = config.to_dict()
    with pytest.raises(UnsupportedModel, match=names) as caught:
        check_supported(_build(config))
    assert "supported are decoder-only models whose layers have full attention" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {**config.to_dict(), "architectures": None} == {**before, "architectures": None}


@pytest.mark.parametrize("build", [tiny_mistral, tiny_gemma, tiny_qwen3_window])
def test_a_window_that_the_model_does_not_keep_to_is_refused(
    build: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that looks back further, or less far, than its configuration says is refused by comparing values."""
    for factor in (0.5, 4):
        model = build(8)
        module = sys.modules[type(model).__module__]
        masks = module.create_sliding_window_causal_mask

        def other_window(config: Any, *args: Any, masks: Any = masks, factor: float = factor, **kwargs: Any) -> Any:
            changed = copy.copy(config)
            changed.sliding_window = int(config.sliding_window * factor)
            return masks(changed, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, "create_sliding_window_causal_mask", other_window)
            with pytest.raises(UnsupportedModel, match="other results over a cached prefix"):
                check_supported(model)


def test_a_recurrent_layer_that_keeps_more_than_its_state_is_refused() -> None:
    """A layer whose results depend on something that the cache does not carry is refused by comparing values."""
    model = tiny_qwen3_next()
    layer = model.model.layers[1].linear_attn
    plain = layer.forward

    def with_memory(hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> Any:
        """Adds the sum of all inputs so far, which it keeps in the cache's layer, beside what is meant to be there."""
        place = SimpleNamespace() if cache_params is None else cache_params.layers[1]
        seen = hidden_states.cumsum(1) + getattr(place, "seen", 0)
        place.seen = seen[:, -1:]
        return plain(hidden_states=hidden_states, cache_params=cache_params, **kwargs) + 0.1 * seen

    layer.forward = with_memory
    with pytest.raises(UnsupportedModel, match="other results over a cached prefix"):
        check_supported(model)


def test_a_recurrent_layer_without_a_temporal_state_is_refused() -> None:
    """A layer that leaves a convolution window alone has not the state that the pools keep."""
    model = tiny_qwen3_next()
    layer = model.model.layers[1].linear_attn
    plain = layer.forward

    class Forgetful:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def __getattr__(self, name: str) -> Any:
            return getattr(self.cache, name)

        def update_recurrent_state(self, *_: Any, **__: Any) -> None:
            return

    def without_temporal(hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> Any:
        cache = None if cache_params is None else Forgetful(cache_params)
        return plain(hidden_states=hidden_states, cache_params=cache, **kwargs)

    layer.forward = without_temporal
    with pytest.raises(UnsupportedModel, match="recurrent layers that keep other states"):
        check_supported(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_kinds": ("full",)}, "1 entries for layer_num=2"),
        ({"layer_kinds": ("full", "window")}, r"window=0 with window layers \[1\]"),
        ({"window": 8}, r"window=8 with window layers \[\]"),
        ({"layer_kinds": ("full", "recurrent")}, r"state=None with recurrent layers \[1\]"),
        ({"layer_kinds": ("full", "local")}, "names .'local'."),
        ({"state": StateGeometry(((4, 2),), (2, 2), torch.float32, torch.float32)}, r"recurrent layers \[\]"),
    ],
)
def test_a_geometry_whose_fields_disagree_is_refused(fields: dict[str, Any], message: str) -> None:
    """Kinds, window and state say the same of the model, or ConfigError says what does not fit."""
    with pytest.raises(ConfigError, match=message):
        ModelGeometry(2, 1, 8, **fields)


def test_a_geometry_names_its_layers() -> None:
    """Layers are found by kind; without kinds, all have full attention."""
    assert ModelGeometry(2, 1, 8).full_layers == (0, 1)
    geometry = ModelGeometry(3, 1, 8, layer_kinds=("window", "full", "window"), window=4)
    assert (geometry.full_layers, geometry.window_layers, geometry.recurrent_layers) == ((1,), (0, 2), ())


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
@pytest.mark.parametrize("window", [0, 1, 3])
def test_a_mask_hides_what_comes_later_and_what_the_window_has_left(kernel: str, window: int) -> None:
    """Query at position p sees keys [0, p], or the window's part of them, and nothing else, in each kernel's form."""
    queries = torch.tensor([[0, 3], [5, 2]])
    for keys in (torch.arange(6)[None], torch.tensor([[-2, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])):
        mask = attention_mask(queries, keys, kernel, torch.float32, window)
        assert mask.shape == (2, 1, 2, 6)
        for b in range(2):
            for q in range(2):
                at = int(queries[b, q])
                seen = [max(0, at - window + 1 if window else 0) <= int(key) <= at for key in keys.expand(2, -1)[b]]
                row = mask[b, 0, q].tolist()
                lowest = torch.finfo(torch.float32).min
                assert row == (seen if kernel == "sdpa" else [0.0 if s else lowest for s in seen])
