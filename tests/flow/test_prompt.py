"""The keys of a prompt are made once while its request waits, and depend on its tokens and namespace."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from hicache.flow.prompt import HostWatch, Prompt, Prompts
from hicache.metrics import Metrics
from hicache.pages.events import EventLog
from hicache.pages.key import PageHasher, PromptPages
from hicache.pages.tree import RadixTree

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


def test_prompts_that_are_never_cancelled_are_bounded_by_bytes() -> None:
    """The prompts used last stay, up to `max_bytes`. A single prompt stays even if it is larger than `max_bytes`."""
    tree = RadixTree(PAGE, PageHasher(b"identity", PAGE))
    small, large = np.arange(4), np.arange(4 * 1000)
    size = Prompts(tree).of(small, "", tree.match(small)).num_bytes
    prompts = Prompts(tree, max_bytes=100 * size)

    def of(request_id: str, tokens: np.ndarray = small) -> Prompt:
        return prompts.of(tokens, "", tree.match(tokens), request_id)

    first, second = of("first"), of("second")
    for number in range(98):
        of(f"r{number}")
    assert of("first") is first
    of("one more")
    assert of("first") is first and of("second") is not second
    kept = of("large", large)
    assert of("large", large) is kept and of("first") is not first
    assert of("large", large) is not kept
    for number in range(5):  # only the last prompt of a request counts
        kept, others = of("again", np.arange(4 * (number + 1))), of("other")
    assert of("again", kept.tokens) is kept and of("other") is others


@pytest.mark.parametrize("has_events", [False, True])
def test_a_host_page_keeps_only_the_tokens_of_its_own_read(has_events: bool) -> None:
    """The tokens of a prompt are dropped with its request. Events still report the tokens of the pages that were read,
    also if only some were."""
    tree, announced = RadixTree(PAGE, PageHasher(b"identity", PAGE)), EventLog()
    watch = HostWatch(Metrics(), PAGE, has_stores=False, events=announced if has_events else None)
    tokens = np.arange(20 * PAGE)
    prompt = Prompts(tree).of(tokens, "", tree.match(tokens))
    keys, held = prompt.keys, weakref.ref(prompt.tokens)
    watch.note(PromptPages(keys, None, prompt.tokens, "").part(14, 20), keys[16:])
    watch.forget(keys[18:])
    del prompt
    gc.collect()
    assert held() is None
    announced_pages = watch.announced(keys[16:18])
    assert len(announced_pages) == has_events
    for pages in announced_pages:
        assert pages.keys == keys[16:18]
        assert pages.previous_key == keys[15]
        assert pages.tokens.tolist() == tokens[16 * PAGE : 18 * PAGE].tolist()
