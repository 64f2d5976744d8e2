"""Every model family of transformers is either served with the tokens of transformers' generate, or refused with the
right reason."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from family_case import tiny_family
from family_table import BEFORE, FAMILIES, LATEST, NEW, REASONS_BEFORE, UNTRIED
from hicache.errors import UnsupportedModel
from hicache.layout import ModelGeometry
from hicache.serving.request import Request
from hicache.serving.runner import ModelRunner
from hicache.serving.scheduler import Scheduler
from hicache.serving.support import check_supported
from hicache.serving.trial import plain_logits
from serving_case import DEVICE, generate, prompt, tiny_engine

IS_BEFORE = hf.__version__.startswith(f"{BEFORE}.")
SERVED = [row for row, family in FAMILIES.items() if family.kind]
# Rows that run by default. The default rows cover each kind of layer with either attention. They also cover experts,
# latent rows, soft caps, sinks, windows alone, heads of two shapes, layers that read another layer's rows, learned
# positions, and states of each form.
BY_DEFAULT = {
    "torch": "gpt2 mistral gpt_oss mimo_v2_flash llama4_text qwen3_next falcon_h1",
    "triton": "mixtral stablelm deepseek_v3 gemma2 gemma3n_text llama4_text lfm2 kimi_linear",
}
# These families are only served with torch's attention: their layers cannot use another attention function, or the
# attention is chunked.
PADDED = {
    "big_bird",
    "diffllama",
    "doge, within keep_window_size",
    "falcon",
    "git",
    "hrm_text",
    "jetmoe",
    "megatron-bert",
    "nemotron",
    "rembert",
    "stablelm",
    "xglm",
    "zamba2, without a minimum time step",
    *({"codegen", "gptj"} if IS_BEFORE else ()),
}
# These reasons follow from the configuration or a signature, so the model needs no weights.
_WITHOUT_WEIGHTS = (
    "has layers of",
    "has only recurrent",
    "has a forward",
    "has no key-value cache",
    "has settings",
)


def _marked(row: str, is_default: bool, *more: str) -> Any:
    return pytest.param(row, *more, marks=() if is_default else pytest.mark.long, id="-".join((row, *more)))


def _refused() -> list[Any]:
    """All refused rows; by default, the first row with each reason."""
    reasons: dict[str, str] = {}
    for row, family in FAMILIES.items():
        if not family.kind:
            reasons.setdefault(family.reason, row)
    return [_marked(row, row in reasons.values()) for row, family in FAMILIES.items() if not family.kind]


def _skip_unknown(row: str) -> None:
    if row.split(",", maxsplit=1)[0] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {row}")


def _kind(geometry: ModelGeometry) -> str:
    if geometry.chunk:
        return "chunked"
    return "hybrid" if geometry.recurrent_layers else "window" if geometry.window_layers else "full"


def _agree(model: Any, tokens: np.ndarray, answer: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether two answers are equal up to the first token whose choice float32 rounding decides."""
    for i, (token, other) in enumerate(zip(answer, expected, strict=True)):
        if token != other:
            logits = plain_logits(model, np.concatenate([tokens, np.array(answer[:i], dtype=np.int64)]))[-1]
            return bool((logits[token] - logits[other]).abs() < 1e-4 * logits.std())
    return True


@pytest.mark.parametrize(
    ("row", "attention"),
    [_marked(row, row in rows.split(), attention) for attention, rows in BY_DEFAULT.items() for row in SERVED],
)
def test_a_family_gives_the_tokens_of_generate(row: str, attention: Literal["torch", "triton"]) -> None:
    """Requests of 5 to 90 tokens are decoded in one batch, and one of them again with a cached prefix. With either
    attention they get the tokens of transformers' generate."""
    _skip_unknown(row)
    model = tiny_family(row)
    if attention == "triton" and row in PADDED:
        with pytest.raises(UnsupportedModel, match="attention='torch'"):
            check_supported(model, attention)
        return
    geometry = check_supported(model, attention)
    assert _kind(geometry) == FAMILIES[row].kind
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 90, 41))]
    settings = {"host_page_size": 4, "max_requests": 4, "max_context_len": 256, "mamba_chunk_tokens": 16}
    with tiny_engine(model, geometry, **settings) as engine:
        scheduler = Scheduler(engine, ModelRunner(model, engine, geometry, attention=attention), chunk_tokens=64)
        outputs = scheduler.run([Request(str(n), tokens, 4) for n, tokens in enumerate(prompts)])
        outputs += scheduler.run([Request("1", prompts[1], 4)])
        engine.check()
    assert outputs[-1].cached_len >= 80
    expected = [generate(model, tokens, 4) for tokens in prompts]
    for output in outputs:
        n = int(output.request_id)
        assert output.error is None and len(output.tokens) == 4
        assert _agree(model, prompts[n], output.tokens, expected[n]), f"{len(prompts[n])} tokens"


@pytest.mark.parametrize("row", _refused())
def test_a_family_is_refused_with_its_reason(row: str) -> None:
    """A family that the runner cannot serve is refused in one line with the reason."""
    _skip_unknown(row)
    reason = IS_BEFORE * REASONS_BEFORE.get(row, "") or FAMILIES[row].reason
    model = tiny_family(row, "meta" if reason.startswith(_WITHOUT_WEIGHTS) else DEVICE)
    with pytest.raises(UnsupportedModel) as caught:
        check_supported(model)
    assert (FAMILIES[row].error or reason) in str(caught.value) and "\n" not in str(caught.value)


def test_every_family_of_the_library_is_in_the_table() -> None:
    """The table contains every family of the transformers releases that it was made for."""
    if not IS_BEFORE and not hf.__version__.startswith(f"{LATEST}."):
        pytest.skip(f"the table is of transformers {BEFORE} and {LATEST}")
    rows = {row.split(",", maxsplit=1)[0] for row in FAMILIES}
    assert (rows | set(UNTRIED)) - (NEW if IS_BEFORE else set()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
