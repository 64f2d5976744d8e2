"""A loader that runs in SGLang's processes. It generates random weights with which the output depends on the cached KV.
This module imports SGLang. SGLang imports this module if the load format names the class."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_loader.loader import DummyModelLoader

from hicache.bench.servers.model import fill_with_normals


class RandomLoader(DummyModelLoader):
    """SGLang's `dummy` loader, with other random weights."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        model: torch.nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        fill_with_normals(model)
        return model
