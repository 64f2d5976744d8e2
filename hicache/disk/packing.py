"""How the pages of a layout are ordered before they are packed. May import storage, config, layout and errors."""

from __future__ import annotations

import math

from hicache.config import Filter
from hicache.errors import ConfigError
from hicache.layout import PoolLayout
from hicache.storage.filters import PageFilter


def page_filter(wanted: Filter, layout: PoolLayout, page_tokens: int) -> PageFilter:
    """The filter for host pages of `page_tokens` tokens.

    "auto": by the bytes of an element, which packs nearly as well as by channels and unpacks twice as fast. For
    channels every buffer of every layer must be [page_tokens, channels] of one size: else ConfigError.
    """
    widths = {spec.dtype.itemsize for spec in layout.buffers}
    rows = {(spec.per, math.prod(spec.shape)) for spec in layout.buffers}
    [(per, channels), *others] = rows
    uniform = len(widths) == 1 and not others and per == "token"
    if wanted == "none":
        return PageFilter()
    if wanted != "channel_planes":
        # Where widths differ, the smallest: a larger one would mix numbers of two buffers.
        return PageFilter("planes", min(widths))
    if not uniform:
        raise ConfigError("disk filter='channel_planes' needs buffers of one shape, a row a token; set it to 'auto'")
    return PageFilter("channel_planes", widths.pop(), page_tokens, channels)
