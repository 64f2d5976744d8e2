"""The models that the runner supports, and the reasons in the errors for other models."""

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
from hicache.layout import LatentGeometry, ModelGeometry, StateGeometry
from hicache.serving.request import Request
from hicache.serving.scheduler import Scheduler
from hicache.serving.support import check_supported
from hicache.serving.trial import plain_logits, relative_difference
from hybrid_case import tiny_gemma, tiny_mistral, tiny_qwen3_next, tiny_qwen3_window
from serving_case import generate, geometry_of, prompt, shared, tiny_engine, tiny_llama, tiny_runner

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
QWEN3_NEXT_STATE = StateGeometry(((2 * 2 * 8 + 4 * 8, 4),), (4, 8, 8), BF16, F32)
LATENT = LatentGeometry(rank=12, rope=8)
FOUND: dict[str, tuple[Callable[[], Any], ModelGeometry]] = {
    "full": (lambda: tiny_llama(layers=3), ModelGeometry(3, 2, 16, dtype=F32)),
    "eager": (lambda: tiny_llama(heads=4, kv_heads=1, kernel="eager"), ModelGeometry(2, 1, 16, dtype=F32)),
    "chunks": (
        lambda: tiny_family("llama4_text", attention_chunk_size=8192),
        ModelGeometry(4, 2, 8, layer_kinds=("chunked", "chunked", "chunked", "full"), chunk=8192, dtype=F32),
    ),
    "states": (
        lambda: tiny_qwen3_next().to(BF16),
        ModelGeometry(4, 2, 16, None, ("recurrent",) * 3 + ("full",), state=QWEN3_NEXT_STATE, dtype=BF16),
    ),
    # A layer with only a convolution has a temporal state of one zero.
    "convolutions": (
        lambda: shared(tiny_family, "lfm2"),
        ModelGeometry(
            4, 2, 8, layer_kinds=("recurrent", "full") * 2, state=StateGeometry(((32, 3),), (1,), F32, F32), dtype=F32
        ),
    ),
    "latent rows": (lambda: tiny_family("deepseek_v3").to(BF16), ModelGeometry(2, 1, 20, dtype=BF16, latent=LATENT)),
    "shared layers": (
        lambda: shared(tiny_family, "gemma4_text"),
        ModelGeometry(
            8, 2, 16, None, ("window", "full") * 4, WINDOW, None, F32, swa_head_num=2, swa_head_dim=8, swa_v_head_dim=8,
            kv_sources=(0, 1, 2, 3, 4, 3, 4, 3),
        ),
    ),
    "uneven heads": (
        lambda: tiny_family("mimo_v2_flash"),
        ModelGeometry(
            4, 2, 8, 4, ("full", "window", "window", "window"), WINDOW, None, F32, swa_head_num=4, swa_head_dim=8,
            swa_v_head_dim=4,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_geometry_is_what_the_layers_store(case: str) -> None:
    """The geometry has the kinds of layers, shapes and dtypes of the stored rows and states. The configuration of the
    model is unchanged afterwards."""
    build, expected = FOUND[case]
    model = build()
    before = model.config.to_dict()
    assert check_supported(model) == expected
    assert model.config.to_dict() == before


def test_a_layer_may_have_attention_and_a_state_or_neither() -> None:
    """A layer may have attention and a state, or neither. A model may have latent rows and states."""
    assert geometry_of(shared(tiny_family, "falcon_h1")).layer_kinds == ("hybrid",) * 4
    some = geometry_of(shared(tiny_family, "nemotron_h, without a minimum time step"))
    assert some.layer_kinds == ("recurrent", "stateless", "full", "stateless")
    hybrid = geometry_of(shared(tiny_family, "kimi_linear"))
    assert hybrid.latent == LATENT and hybrid.layer_kinds == ("recurrent", "full") * 2


@pytest.mark.parametrize(
    ("window", "build", "kinds"),
    [
        (1, tiny_mistral, ("window",) * 3),
        (2, tiny_gemma, ("window", "window", "full", "window")),
        (16, tiny_qwen3_window, ("full", "full", "window", "window")),
        (4096, tiny_gemma, ("window", "window", "full", "window")),
        (200_000, tiny_mistral, ("window",) * 3),
    ],
)
def test_windows_are_found(window: int, build: Callable[[int], Any], kinds: Any) -> None:
    """The kinds of layers and the window come from the configuration, however long the window is. The configuration is
    unchanged afterwards."""
    model = build(window)
    before = model.config.to_dict()
    assert check_supported(model) == ModelGeometry(len(kinds), 2, 16, layer_kinds=kinds, window=window, dtype=F32)
    assert model.config.to_dict() == before


@pytest.mark.parametrize(("row", "limit"), [("llama, rope_type=dynamic", 512), ("phi3, rope_type=longrope", 128)])
def test_rotary_frequencies_that_follow_the_length_bound_the_context(row: str, limit: int) -> None:
    """If all keys change when a sequence exceeds some length, sequences up to that length are served, and the engine
    refuses longer ones."""
    model = shared(tiny_family, row)
    assert geometry_of(model).max_context_len == limit
    tokens = prompt(limit + 20, seed=1)
    part, complete = (plain_logits(model, tokens[:length])[limit - 5] for length in (limit, limit + 20))
    assert relative_difference(complete, part) > 0.01  # the keys of all tokens have changed
    with tiny_engine(model, max_context_len=1024, device_tokens=1024) as engine:
        scheduler = Scheduler(engine, tiny_runner(model, engine))
        long, short = scheduler.run([Request("long", tokens, 4), Request("short", tokens[: limit - 4], 4)])
        assert isinstance(long.error, PromptTooLong) and "max_context_len" in str(long.error)
        assert short.error is None and short.tokens == generate(model, tokens[: limit - 4], 4)


def _with_several_windows() -> Any:
    model = tiny_family("mistral")
    model.config.window_sizes = [4, 8, 4, 8]
    return model


REFUSED: dict[str, Callable[[], Any]] = {
    "attention_chunk_size": lambda: tiny_family(
        "llama4_text", "meta", attention_chunk_size=None, layer_types=["chunked_attention", "full_attention"] * 2
    ),
    "sliding_window": lambda: tiny_family(
        "qwen3", "meta", sliding_window=None, layer_types=["full_attention", "sliding_attention"]
    ),
    "vary from layer to layer (sliding_window)": lambda: tiny_family(
        "mistral", "meta", per_layer_config={1: {"sliding_window": 5}}
    ),
    "window_sizes=": _with_several_windows,
    # A trial is as long as the window of a family, up to the maximum length of a trial.
    "gives different results": lambda: tiny_family("gpt_neo", window_size=300).to(BF16),
    "window_size=5000": lambda: tiny_family("gpt_neo", "meta", window_size=5000, max_position_embeddings=8192),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_rules_a_model_out_is_named(named: str) -> None:
    """A model is refused in one line with the setting or the observed difference, and the supported models."""
    model = REFUSED[named]()
    before = model.config.to_dict()
    with pytest.raises(UnsupportedModel) as caught:
        check_supported(model)
    line = str(caught.value)
    assert named in line and "\n" not in line and ("supported are decoder-only" in line or "at most 4096" in line)
    assert model.config.to_dict() == before


def test_a_choice_of_the_best_keys_is_served_where_all_are_kept() -> None:
    """A family that attends to the best keys is refused, because rounding decides between nearly equal scores. The
    family is served if no prompt has more keys than the family keeps."""
    assert check_supported(tiny_family("doge", keep_window_size=1 << 20)).layer_num


def _other_window(factor: float) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def tamper(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = sys.modules[type(model).__module__]
        masks = module.create_sliding_window_causal_mask

        def other(config: Any, *args: Any, **kwargs: Any) -> Any:
            changed = copy.copy(config)
            changed.sliding_window = int(config.sliding_window * factor)
            return masks(changed, *args, **kwargs)

        monkeypatch.setattr(module, "create_sliding_window_causal_mask", other)

    return tamper


def _hidden_state(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a recurrent layer add the sum of all its inputs so far, which it stores in an attribute of the cache's
    layer."""
    layer = model.model.layers[1].linear_attn
    plain = layer.forward

    def forward(hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> Any:
        layer = SimpleNamespace() if cache_params is None else cache_params.layers[1]
        total = hidden_states.cumsum(1) + getattr(layer, "total", 0)
        layer.total = total[:, -1:]
        return plain(hidden_states=hidden_states, cache_params=cache_params, **kwargs) + 0.1 * total

    layer.forward = forward


def _no_temporal_state(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one recurrent layer store only a convolution window."""
    layer = model.model.layers[1].linear_attn
    plain = layer.forward

    def forward(**kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(hf.cache_utils.LinearAttentionLayer, "update_recurrent_state", lambda *_: None)
            return plain(**kwargs)

    layer.forward = forward


def _number_of_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model.model.layers[0].self_attn.forward

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        output, weights = plain(hidden_states=hidden_states, **kwargs)
        return output * (1 + 0.02 * hidden_states.shape[1]), weights

    model.model.layers[0].self_attn.forward = forward


def _positions_from_zero(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda hidden, position_ids: plain(hidden, position_ids - position_ids[:, :1])


@pytest.mark.parametrize(
    ("build", "dtype", "tamper", "reason"),
    [
        pytest.param(lambda: tiny_mistral(8), F32, _other_window(0.5), "with a cached prefix", id="short window"),
        pytest.param(lambda: tiny_mistral(100), BF16, _other_window(4), "with a cached prefix", id="long window"),
        pytest.param(
            lambda: tiny_qwen3_window(100), F32, _other_window(0.5), "with a cached prefix", id="short, some layers"
        ),
        pytest.param(tiny_qwen3_next, F32, _hidden_state, "with a cached prefix", id="hidden state"),
        pytest.param(tiny_qwen3_next, F32, _no_temporal_state, "keep other states", id="no temporal state"),
        pytest.param(tiny_llama, BF16, _number_of_tokens, "is not causal", id="number of tokens"),
        pytest.param(tiny_llama, F16, _positions_from_zero, "with a cached prefix", id="positions from 0"),
    ],
)
def test_what_the_configuration_does_not_say_is_found_by_values(
    build: Callable[[], Any],
    dtype: torch.dtype,
    tamper: Callable[[Any, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that depends on more than its configuration and the pools describe is refused after comparing values."""
    model = build().to(dtype)
    tamper(model, monkeypatch)
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(model)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_kinds": ("full",)},
        {"layer_kinds": ("full", "window")},
        {"window": 8},
        {"layer_kinds": ("full", "recurrent")},
        {"layer_kinds": ("full", "local")},
        {"state": QWEN3_NEXT_STATE},
        {"chunk": 4},
        {"layer_kinds": ("full", "chunked")},
        {"kv_sources": (0,)},
        {"kv_sources": (1, 1)},
        {"kv_sources": (0, -1)},
        {"kv_sources": (0, 0), "layer_kinds": ("full", "window"), "window": 4},
        {"latent": LatentGeometry(6, 4)},
        {"latent": LatentGeometry(6, 2), "v_head_dim": 8},
        {"latent": LatentGeometry(6, 2), "layer_kinds": ("window", "full"), "window": 2},
    ],
)
def test_a_geometry_whose_fields_disagree_is_refused(fields: dict[str, Any]) -> None:
    """If kinds, window, state, sources and latent rows contradict one another, ConfigError names a field."""
    with pytest.raises(ConfigError) as caught:
        ModelGeometry(2, 1, 8, **fields)
    assert any(name.split("_")[0] in str(caught.value) for name in fields)


@pytest.mark.parametrize(
    ("row", "dtype"), [("llama", F16), ("mistral", BF16), ("qwen3_next", F16), ("mixtral", BF16), ("gpt_oss", F16)]
)
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
    model = tiny_family("llama", "cpu", num_hidden_layers=24, hidden_size=64, head_dim=16).to(BF16)
    tokens = prompt(40, 1)
    complete = plain_logits(model, tokens)
    moved = [relative_difference(plain_logits(model, tokens[:n])[-1], complete[n - 1]) for n in (7, 16, 33)]
    assert max(moved) > 0.01, moved  # otherwise this test would not test rounding
    assert check_supported(model).layer_num == 24


def test_a_model_in_training_mode_is_examined_without_dropout() -> None:
    """A model in training mode is supported despite dropout, and stays in training mode."""
    model = tiny_family("gpt2", attn_pdrop=0.5, resid_pdrop=0.5).train()
    check_supported(model)
    assert model.training


def test_running_out_of_memory_is_raised() -> None:
    """An allocation error is raised unchanged, and the weights have 16 bits again."""
    model = tiny_llama().to(BF16)
    layer = model.model.layers[1]
    plain = layer.forward

    def short(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if hidden_states.dtype == F32:
            raise torch.OutOfMemoryError("no memory for the wider weights")
        return plain(hidden_states, **kwargs)

    layer.forward = short
    with pytest.raises(torch.OutOfMemoryError):
        check_supported(model)
    assert {weight.dtype for weight in model.parameters()} == {BF16}
