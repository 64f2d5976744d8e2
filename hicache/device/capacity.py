"""Computes the `size` of a pool, in tokens, from a device's memory and a layout.

Only callers with SGLang's interface use `plan_capacity`. For hicache's own engine, `hicache/build/sizing.py` computes
the sizes.
"""

from __future__ import annotations

from hicache.errors import ConfigError, OutOfMemory
from hicache.layout import PoolLayout


def plan_capacity(
    total_bytes: int,
    model_bytes: int,
    layout: PoolLayout,
    *,
    mem_fraction_static: float | None = None,
    reserve_ratio: float | None = None,
    max_requests: int = 0,
) -> int:
    """Return the number of tokens that a pool of `layout` can store on a device of `total_bytes`, next to a model of
    `model_bytes`.

    Exactly one of two settings determines the bytes of the cache:

        mem_fraction_static   total_bytes * mem_fraction_static - model_bytes     (the rest is for activations)
        reserve_ratio         (total_bytes - model_bytes) * (1 - reserve_ratio)

    The bytes of page 0, of state 0 (both for padding), and of the states of `max_requests` requests are deducted. A
    state is the rows that a layout stores per request. The result is a multiple of the device page. Raises ConfigError
    for invalid settings. Raises OutOfMemory if no page fits; its message has the numbers and the setting to change.
    """
    budget, setting = _budget(total_bytes, model_bytes, mem_fraction_static, reserve_ratio)
    page = layout.device_page_size
    request_bytes = sum(s.row_bytes * len(s.layers) for s in layout.buffers if s.per == "request")
    paged = [s for s in layout.buffers if s.per != "request"]
    page_bytes = sum(s.rows(page, page) * s.row_bytes * len(s.layers) for s in paged)
    if not page_bytes:
        raise ConfigError("the layout stores nothing per token, only per request; its capacity is a number of requests")
    state_bytes = request_bytes * (max_requests + 1) if request_bytes else 0
    num_pages = (budget - state_bytes) // page_bytes - 1
    remedy = "lower reserve_ratio" if mem_fraction_static is None else "raise mem_fraction_static"
    if num_pages < 1:
        raise OutOfMemory(
            f"{total_bytes} bytes with a model of {model_bytes} leave {max(budget, 0)} for the cache ({setting}); "
            f"states of {max_requests} requests take {state_bytes} and two pages of {page} tokens {2 * page_bytes}; "
            f"{remedy}, run fewer requests or choose a smaller model"
        )
    return num_pages * page


def _budget(
    total_bytes: int, model_bytes: int, mem_fraction_static: float | None, reserve_ratio: float | None
) -> tuple[int, str]:
    """Return the bytes for the cache, which may be negative, and the setting that determines these bytes, as text."""
    if total_bytes < 1 or model_bytes < 0:
        raise ConfigError(f"total_bytes={total_bytes}, model_bytes={model_bytes}: bytes cannot be negative or none")
    if mem_fraction_static is not None and reserve_ratio is None:
        if not 0 < mem_fraction_static <= 1:
            raise ConfigError(f"mem_fraction_static={mem_fraction_static} must be above 0 and at most 1")
        return int(total_bytes * mem_fraction_static) - model_bytes, f"mem_fraction_static={mem_fraction_static}"
    if reserve_ratio is not None and mem_fraction_static is None:
        if not 0 <= reserve_ratio < 1:
            raise ConfigError(f"reserve_ratio={reserve_ratio} must be at least 0 and below 1")
        return int((total_bytes - model_bytes) * (1 - reserve_ratio)), f"reserve_ratio={reserve_ratio}"
    raise ConfigError(
        f"mem_fraction_static={mem_fraction_static}, reserve_ratio={reserve_ratio}: give exactly one of the two"
    )
