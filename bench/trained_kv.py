"""Keys and values of a trained transformer, for what a store packs.

AntiBERTy, a language model of antibody sequences (8 layers, 8 heads of 64, 26M parameters; Ruffolo et al. 2021), whose
release 0.1.3 on PyPI holds its weights: `pip install --no-deps antiberty==0.1.3`. Its input here is the heavy chain of
trastuzumab, mutated at random, over and over. A helper of the disk bench. May import numpy, torch and transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    from transformers import BertModel
except ImportError:
    BertModel = None

from hicache.storage import PageBuffer

MODEL = "K and V of AntiBERTy 0.1.3"
TOKENS, LAYERS, CHANNELS = 512, 8, 512
PAGE_BYTES = LAYERS * 2 * TOKENS * CHANNELS * 2
_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # tokens from 5 on, in this order; 2 begins a sequence and 3 ends it
_CHAIN = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRY"
    "ADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
)
_MUTATED = 0.15  # of all residues


def trained_pages(count: int) -> list[PageBuffer] | None:
    """Pages of 512 tokens in bf16, `[layer][K, V][tokens, channels]`; None where the packages are not installed."""
    found = importlib.util.find_spec("antiberty")
    if BertModel is None or found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "trained_models" / "AntiBERTy_md_smooth"
    model: Any = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    rng = np.random.default_rng(5)
    return [_page(model, _sequence(rng)) for _ in range(count)]


@torch.no_grad()
def _page(model: Any, tokens: np.ndarray) -> PageBuffer:
    hidden = model(input_ids=torch.from_numpy(tokens)[None], output_hidden_states=True).hidden_states
    layers = zip(model.encoder.layer, hidden[:-1], strict=True)
    rows = [part(x[0]) for layer, x in layers for part in (layer.attention.self.key, layer.attention.self.value)]
    return torch.stack(rows).bfloat16().view(torch.uint8).reshape(-1).numpy()


def _sequence(rng: np.random.Generator) -> np.ndarray:
    """Mutants of the chain, one behind the other, int64 [512]."""
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        chain = [_RESIDUES.index(residue) for residue in _CHAIN]
        mutants = [int(rng.integers(20)) if rng.random() < _MUTATED else residue for residue in chain]
        tokens += [2, *(5 + residue for residue in mutants), 3]
    return np.array(tokens[:TOKENS], dtype=np.int64)
