"""The keys of a prompt are made once while its request waits, and are those of its tokens and namespace."""

from __future__ import annotations

import numpy as np

from hicache.flow.prompt import Prompts
from hicache.tree import PageHasher, RadixTree

PAGE = 4


def test_keys_are_made_once_and_of_the_same_prompt_alone() -> None:
    hasher = PageHasher(b"identity", PAGE)
    tree = RadixTree(PAGE, hasher)
    prompts, tokens = Prompts(tree), np.arange(19)

    def of(tokens: np.ndarray, namespace: str = "", request_id: str = "a") -> list[bytes]:
        return prompts.of(tokens, namespace, tree.match(tokens, namespace), request_id).keys

    first = of(tokens)
    assert first == hasher.chain(hasher.seed(""), tokens[:16]) and of(tokens) is first
    hashed = hasher.pages_hashed
    assert of(tokens[:17]) is first and hasher.pages_hashed == hashed
    others = [of(tokens, "tenant"), of(np.append(tokens[:12], [7] * 7)), of(tokens[:12])]
    assert others[0] != first and others[1][:3] == first[:3] == others[2] and others[1] != first
    prompts.forget("a")
    assert of(tokens) is not first


def test_requests_that_nobody_cancels_are_forgotten() -> None:
    tree = RadixTree(PAGE, PageHasher(b"identity", PAGE))
    prompts, tokens = Prompts(tree), np.arange(4)
    first = prompts.of(tokens, "", tree.match(tokens), "first")
    assert prompts.of(tokens, "", tree.match(tokens), "first") is first
    for number in range(5000):
        prompts.of(tokens, "", tree.match(tokens), f"r{number}")
    assert prompts.of(tokens, "", tree.match(tokens), "first") is not first
