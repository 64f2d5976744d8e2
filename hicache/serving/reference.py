"""What transformers' own `generate` answers: a truth that shares no code with the runner, the pools or the engine.

May import transformers and torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig


@torch.inference_mode()
def generate(
    model: Any, tokens: npt.NDArray[np.int64], max_new_tokens: int, eos_ids: Iterable[int] = ()
) -> tuple[int, ...]:
    """The most likely continuation of `tokens`, int64 [len], one after the other, with the library's own cache.

    Ends after a token of `eos_ids`, which is part of it. The model's own generation settings are left aside.
    """
    ids = torch.from_numpy(tokens).to(model.device)[None]
    ends = sorted(eos_ids)
    settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=0
            ),
        )
    finally:
        model.generation_config = settings
    return tuple(output[0, len(tokens) :].tolist())
