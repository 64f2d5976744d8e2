"""Which models the runner supports, and the reason in the error for those it does not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from family_case import tiny_family
from family_table import WINDOW
from hicache.errors import ConfigError, PromptTooLong, UnsupportedModel
from hicache.layout import HeadShape, LatentGeometry, ModelGeometry, StateGeometry
from hicache.serving.drive import generate
from hicache.serving.padded_passes import attention_mask
from hicache.serving.request import Request
from hicache.serving.scheduler import Scheduler
from hicache.serving.support import check_supported
from hicache.serving.trial import Trial, plain_logits, relative_difference
from hybrid_case import tiny_gemma, tiny_mistral, tiny_qwen3_next, tiny_qwen3_window
from serving_case import geometry_of, prompt, shared, tiny_engine, tiny_llama, tiny_runner

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
    """Layers, KV heads, head size and dtype are those of the keys and values that the model stores."""
    model = tiny_llama(layers=3, heads=4, kv_heads=2, kernel=kernel)
    assert check_supported(model) == ModelGeometry(layer_num=3, head_num=2, head_dim=16, dtype=torch.float32)


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
    """Support does not depend on the model's name: any architecture with plain attention is supported."""
    geometry = check_supported(_build(config))
    assert (geometry.layer_num, geometry.head_dim) == (2, 8)


@pytest.mark.parametrize("window", [1, 2, 3, 16, 4096, 200_000])
def test_windows_are_found(window: int) -> None:
    """Kinds of layers and the window come from the configuration, which is unchanged afterwards."""
    heads: dict[str, Any] = {"head_num": 2, "head_dim": 16, "window": window, "dtype": torch.float32}
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
    """Shapes and dtypes of a state are those in the layers: a whole convolution window and a temporal part."""
    assert check_supported(tiny_qwen3_next().to(dtype)) == ModelGeometry(
        layer_num=4,
        head_num=2,
        head_dim=16,
        layer_kinds=("recurrent", "recurrent", "recurrent", "full"),
        state=StateGeometry(((2 * 2 * 8 + 4 * 8, 4),), (4, 8, 8), dtype, torch.float32),
        dtype=dtype,
    )


def test_states_of_other_layers_are_found() -> None:
    """A layer that is a convolution alone has a window and no temporal state; one layer may have attention and a
    state, and others neither."""
    convolutions = check_supported(tiny_family("lfm2"))
    assert (convolutions.full_layers, convolutions.recurrent_layers) == ((1, 3), (0, 2))
    assert convolutions.state == StateGeometry(((32, 3),), (1,), torch.float32, torch.float32)
    both = check_supported(tiny_family("falcon_h1"))
    assert both.full_layers == both.recurrent_layers == (0, 1, 2, 3) and both.layer_kinds == ("hybrid",) * 4
    some = check_supported(tiny_family("nemotron_h, without a minimum time step"))
    assert some.layer_kinds == ("recurrent", "stateless", "full", "stateless")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_rows_are_found(dtype: torch.dtype) -> None:
    """A model that compresses its keys and values stores one row for each token and layer, of latent and rotary part,
    beside recurrent layers too."""
    latent = LatentGeometry(rank=12, rope=8)
    geometry = check_supported(tiny_family("deepseek_v3").to(dtype))
    assert geometry == ModelGeometry(layer_num=2, head_num=1, head_dim=20, dtype=dtype, latent=latent)
    hybrid = check_supported(tiny_family("kimi_linear").to(dtype))
    assert hybrid.latent == latent and hybrid.full_layers == (1, 3) and hybrid.recurrent_layers == (0, 2)


@pytest.mark.parametrize("chunk", [1, 16, 8192])
def test_chunks_are_found(chunk: int) -> None:
    """Chunked layers keep all tokens; the size of a chunk comes from the configuration, which is unchanged."""
    model = tiny_family("llama4_text", attention_chunk_size=chunk)
    geometry = check_supported(model)
    assert geometry.layer_kinds == ("chunked", "chunked", "chunked", "full") and geometry.chunk == chunk
    assert geometry.full_layers == (0, 1, 2, 3) and model.config.attention_chunk_size == chunk


def test_shapes_of_a_kind_and_shared_layers_are_found() -> None:
    """Window layers may have heads of their own, keys and values different sizes, and the last layers may read what the
    last layer of their kind stored."""
    shared_layers = check_supported(tiny_family("gemma4_text"))
    assert shared_layers == ModelGeometry(
        8, 2, 16, None, ("window", "full") * 4, WINDOW, None, torch.float32, swa_head_num=2, swa_head_dim=8,
        swa_v_head_dim=8, kv_sources=(0, 1, 2, 3, 4, 3, 4, 3),
    )  # fmt: skip
    assert shared_layers.full_layers == (1, 3) and shared_layers.window_layers == (0, 2, 4)
    other = check_supported(tiny_family("gemma4_unified_text"))
    assert (other.full_heads, other.window_heads) == (HeadShape(1, 16, 16), HeadShape(2, 8, 8))
    uneven = check_supported(tiny_family("mimo_v2_flash"))
    assert (uneven.full_heads, uneven.window_heads) == (HeadShape(2, 8, 4), HeadShape(4, 8, 4))


@pytest.mark.parametrize(
    ("row", "limit"), [("llama, rope_type=dynamic", 512), ("phi3, rope_type=longrope", 128), ("llama", 0)]
)
def test_rotary_frequencies_that_follow_the_length_bound_the_context(row: str, limit: int) -> None:
    """Where all keys change once a sequence passes a length, sequences up to that length are served, and the engine
    refuses longer ones."""
    model = tiny_family(row)
    assert check_supported(model).max_context_len == limit
    if not limit:
        return
    tokens = prompt(limit + 20, seed=1)
    part, whole = (plain_logits(model, tokens[:length])[limit - 5] for length in (limit, limit + 20))
    assert relative_difference(whole, part) > 0.01  # all tokens' keys have changed
    with tiny_engine(model, max_context_len=1024, device_tokens=1024) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        long, short = scheduler.run([Request("long", tokens, 4), Request("short", tokens[: limit - 4], 4)])
        assert isinstance(long.error, PromptTooLong) and "max_context_len" in str(long.error)
        assert short.error is None and short.tokens == generate(model, tokens[: limit - 4], 4)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
            "recurrent layers alone",
        ),
        (
            hf.RecurrentGemmaConfig(**{**SMALL, "num_hidden_layers": 3}, attention_window_size=8),
            "sliding_attention beside linear_attention",
        ),
        (hf.Llama4TextConfig(**SMALL, attention_chunk_size=None), "without an attention_chunk_size"),
        (
            hf.Qwen3Config(**SMALL, sliding_window=None, layer_types=["full_attention", "sliding_attention"]),
            "without a sliding_window",
        ),
        (hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "Bloom"),
        # Its kernels ignore the state when several tokens follow.
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
            "is not causal",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_unsupported_layers_are_named(config: Any, names: str) -> None:
    """A model with unsupported layers is refused in one line that names them and says what is supported."""
    before = config.to_dict()
    with pytest.raises(UnsupportedModel, match=names) as caught:
        check_supported(_build(config))
    assert "supported are decoder-only models whose layers have full" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {**config.to_dict(), "architectures": None} == {**before, "architectures": None}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("window", [8, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [tiny_mistral, tiny_gemma, tiny_qwen3_window])
def test_a_window_that_differs_from_the_configuration_is_refused(
    build: Callable[[int], Any], dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose window is longer or shorter than its configuration says is refused by comparing values."""
    for factor in (0.5, 4):
        model = build(window).to(dtype)
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


def test_a_recurrent_layer_with_hidden_state_is_refused() -> None:
    """A layer whose output depends on something that the pools do not store is refused by comparing values."""
    model = tiny_qwen3_next()
    layer = model.model.layers[1].linear_attn
    plain = layer.forward

    def with_memory(hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> Any:
        """Adds the sum of all inputs so far, which it stores in an attribute of the cache's layer."""
        layer = SimpleNamespace() if cache_params is None else cache_params.layers[1]
        total = hidden_states.cumsum(1) + getattr(layer, "total", 0)
        layer.total = total[:, -1:]
        return plain(hidden_states=hidden_states, cache_params=cache_params, **kwargs) + 0.1 * total

    layer.forward = with_memory
    with pytest.raises(UnsupportedModel, match="other results over a cached prefix"):
        check_supported(model)


def test_a_recurrent_layer_without_a_temporal_state_is_refused() -> None:
    """A layer that stores a convolution window but no temporal state is refused."""
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
        ({"layer_kinds": ("full", "local")}, "contains .'local'."),
        ({"state": StateGeometry(((4, 2),), (2, 2), torch.float32, torch.float32)}, r"recurrent layers \[\]"),
        ({"chunk": 4}, r"chunk=4 with layers of kinds \['full'\]"),
        ({"layer_kinds": ("full", "chunked")}, "chunk=0 with layers of kinds"),
        ({"kv_sources": (0,)}, "1 entries for layer_num=2"),
        ({"kv_sources": (1, 1)}, r"kv_sources=\(1, 1\): layer 0 must read its own"),
        ({"kv_sources": (0, -1)}, r"layer 1 must read its own"),
        ({"kv_sources": (0, 0), "layer_kinds": ("full", "window"), "window": 4}, "window=4 with window layers"),
        ({"latent": LatentGeometry(6, 4)}, r"= \(1, 8, None\) .* latent rows need 1, 10, None and no windows"),
        ({"latent": LatentGeometry(6, 2), "v_head_dim": 8}, r"= \(1, 8, 8\)"),
        ({"latent": LatentGeometry(6, 2), "layer_kinds": ("window", "full"), "window": 2}, r"window layers \[0\]"),
    ],
)
def test_a_geometry_whose_fields_disagree_is_refused(fields: dict[str, Any], message: str) -> None:
    """If kinds, window and state contradict one another, ConfigError names the contradiction."""
    with pytest.raises(ConfigError, match=message):
        ModelGeometry(2, 1, 8, **fields)


def test_a_geometry_names_its_layers() -> None:
    """Layers are listed by kind; without kinds, all have full attention."""
    assert ModelGeometry(2, 1, 8).full_layers == (0, 1)
    geometry = ModelGeometry(3, 1, 8, layer_kinds=("window", "full", "window"), window=4)
    assert (geometry.full_layers, geometry.window_layers, geometry.recurrent_layers) == ((1,), (0, 2), ())


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_that_depends_on_the_number_of_tokens_is_refused(dtype: torch.dtype) -> None:
    """A model whose output depends on the number of input tokens is refused by comparing values."""
    model = tiny_llama().to(dtype)
    plain = model.model.layers[0].self_attn.forward

    def with_input_length(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        output, weights = plain(hidden_states=hidden_states, **kwargs)
        return output * (1 + 0.02 * hidden_states.shape[1]), weights

    model.model.layers[0].self_attn.forward = with_input_length
    with pytest.raises(UnsupportedModel, match="is not causal"):
        check_supported(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_ignores_the_given_positions_is_refused(dtype: torch.dtype) -> None:
    """A model that numbers the tokens of each pass from 0 is refused by comparing values."""
    model = tiny_llama().to(dtype)
    plain = model.model.rotary_emb.forward

    def from_zero(hidden_states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(hidden_states, position_ids - position_ids[:, :1])

    model.model.rotary_emb.forward = from_zero
    with pytest.raises(UnsupportedModel, match="other results over a cached prefix"):
        check_supported(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_in_the_models_own_mask_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias such as ALiBi that a model adds only to masks of its own is detected, as a given mask lacks it."""
    model = tiny_llama(kernel="eager").to(dtype)
    module = sys.modules[type(model).__module__]
    masks = module.create_causal_mask

    def with_bias(*args: Any, attention_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        mask: torch.Tensor = masks(*args, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None:
            return mask
        return mask + 0.1 * torch.arange(mask.shape[-1], dtype=mask.dtype, device=mask.device)

    monkeypatch.setattr(module, "create_causal_mask", with_bias)
    with pytest.raises(UnsupportedModel, match="other results over a cached prefix"):
        check_supported(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trial_exceeds_the_bounds_of_a_layer(dtype: torch.dtype) -> None:
    """A layer that behaves otherwise beyond a number of tokens is detected, up to the maximum length of a trial; if
    that is too short, the message names the number."""
    for value in (30, 300):
        with pytest.raises(UnsupportedModel, match="other results over"):
            check_supported(tiny_family("gpt_neo", window_size=value).to(dtype))
    with pytest.raises(UnsupportedModel, match="window_size=5000"):
        check_supported(tiny_family("gpt_neo", "meta", window_size=5000, max_position_embeddings=8192))


def test_a_choice_of_the_best_keys_is_refused() -> None:
    """A layer that attends to the k best keys is refused with the value of k, unless no prompt has more keys: rounding
    decides between nearly equal scores."""
    with pytest.raises(UnsupportedModel, match=r"best keys alone.*keep_window_size=300"):
        check_supported(tiny_family("doge", keep_window_size=300))
    assert check_supported(tiny_family("doge", keep_window_size=1 << 20)).layer_num


def test_settings_that_vary_from_layer_to_layer_are_refused() -> None:
    """Windows of several sizes are refused with the name of the setting, in either form of configuration."""
    with pytest.raises(UnsupportedModel, match=r"vary from layer to layer \(sliding_window\)"):
        check_supported(tiny_family("mistral", per_layer_config={1: {"sliding_window": 5}}))
    model = tiny_family("mistral")
    model.config.window_sizes = [4, 8, 4, 8]
    with pytest.raises(UnsupportedModel, match=r"windows of several sizes \(window_sizes="):
        check_supported(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", ["llama", "mistral", "qwen3_next", "mixtral", "gpt_oss"])
def test_a_model_with_16_bit_weights_is_supported(row: str, dtype: torch.dtype) -> None:
    """A model with 16-bit weights is supported like the same model in float32, and its weights are unchanged."""
    model, expected = tiny_family(row), geometry_of(shared(tiny_family, row))
    weights = {
        name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in model.to(dtype).state_dict().items()
    }
    geometry = check_supported(model)
    assert (geometry.kinds, geometry.window) == (expected.kinds, expected.window)
    for name, tensor in model.state_dict().items():
        before, pointer, value = weights[name]
        assert tensor.dtype == before.dtype and tensor.data_ptr() == pointer and torch.equal(tensor, value), name
    assert not model.training and model.dtype == dtype


def test_a_deep_model_in_bfloat16_is_supported() -> None:
    """A model whose 16-bit logits depend noticeably on the length of a forward is supported."""
    # On the CPU, where rounding depends on the length; on a GPU it does not for so small a model.
    model = tiny_family("llama", "cpu", num_hidden_layers=48, hidden_size=64, head_dim=16).to(torch.bfloat16)
    tokens = prompt(40, 1)
    whole = plain_logits(model, tokens)
    moved = [relative_difference(plain_logits(model, tokens[:n])[-1], whole[n - 1]) for n in (7, 16, 33)]
    assert max(moved) > 0.01, moved  # otherwise the test proves nothing
    assert check_supported(model).layer_num == 48


def test_a_model_in_training_mode_is_examined_without_dropout() -> None:
    """A model in training mode is supported despite dropout, and stays in training mode."""
    model = tiny_family("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train()
    check_supported(model)
    assert model.training


def test_running_out_of_memory_is_raised() -> None:
    """An allocation error is raised unchanged, and the weights are 16-bit again."""
    model = tiny_llama().to(torch.bfloat16)
    layer = model.model.layers[1]
    plain = layer.forward

    def short(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if hidden_states.dtype == torch.float32:
            raise torch.OutOfMemoryError("no memory for the wider weights")
        return plain(hidden_states, **kwargs)

    layer.forward = short
    with pytest.raises(torch.OutOfMemoryError):
        check_supported(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.gpu
def test_an_8b_model_in_bfloat16_is_supported() -> None:
    """A model of 8B geometry with random 16-bit weights is supported, and its served logits differ from plain ones by
    no more than plain ones of different lengths differ from one another."""
    config = hf.LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"), torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    geometry = check_supported(model)
    assert geometry == ModelGeometry(layer_num=32, head_num=8, head_dim=128, dtype=torch.bfloat16)
    # One layer of 218 million weights in float32, the weights outside of the layers, and activations.
    assert torch.cuda.max_memory_allocated() - before < 3 << 30
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    tokens = prompt(64, 1)
    with torch.inference_mode():
        whole = plain_logits(model, tokens)
        own = max(relative_difference(plain_logits(model, tokens[:n])[-1], whole[n - 1]) for n in (7, 16, 33))
        served = Trial(model, 64).served_difference(geometry, "auto")
    assert 0 < own < 1 and served < 3 * own, (own, served)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (1, 0), (3, 0), (0, 1), (0, 2), (0, 4)])
def test_a_mask_is_causal_and_limited_to_window_or_chunk(kernel: str, window: int, chunk: int) -> None:
    """A query at position p sees keys [0, p], or the part of them in its window or chunk, and no others, in each
    kernel's format."""
    queries = torch.tensor([[0, 3], [5, 2]])
    for keys in (torch.arange(6)[None], torch.tensor([[-2, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])):
        mask = attention_mask(queries, keys, kernel, torch.float32, window, chunk)
        assert mask.shape == (2, 1, 2, 6)
        for b in range(2):
            for q in range(2):
                position = int(queries[b, q])
                first = max(0, position - window + 1) if window else position // chunk * chunk if chunk else 0
                seen = [first <= int(key) <= position for key in keys.expand(2, -1)[b]]
                row = mask[b, 0, q].tolist()
                lowest = torch.finfo(torch.float32).min
                assert row == (seen if kernel == "sdpa" else [0.0 if s else lowest for s in seen])
