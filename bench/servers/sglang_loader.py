"""What the benchmark brings into SGLang's own processes: random weights whose output depends on what is cached. Imports
SGLang, which imports this where it finds the class named as its load format."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_loader.loader import DummyModelLoader

from hicache.bench.servers.model import fill_with_normals


class RandomLoader(DummyModelLoader):
    """SGLang's `dummy`, with other numbers."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        model: torch.nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        fill_with_normals(model)
        return model
