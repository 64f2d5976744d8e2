"""Which filter the pages of a layout are stored with: how their bytes are ordered before compression."""

from __future__ import annotations

import math

from hicache.config import Filter
from hicache.errors import ConfigError
from hicache.layout import PoolLayout
from hicache.storage.filters import PageFilter


def page_filter(wanted: Filter, layout: PoolLayout, page_tokens: int) -> PageFilter:
    """The filter for host pages of `page_tokens` tokens.

    "auto": byte_shuffle, which compresses nearly as well as channel_byte_shuffle and decompresses twice as fast. For
    channel_byte_shuffle every buffer of every layer must be [page_tokens, channels] of one size: else ConfigError.
    """
    widths = {spec.dtype.itemsize for spec in layout.buffers}
    rows = {(spec.per, math.prod(spec.shape)) for spec in layout.buffers}
    [(per, channels), *others] = rows
    is_uniform = len(widths) == 1 and not others and per == "token"
    if wanted == "none":
        return PageFilter()
    if wanted != "channel_byte_shuffle":
        # Where widths differ, the smallest: a larger one would mix numbers of two buffers.
        return PageFilter("byte_shuffle", min(widths))
    if not is_uniform:
        raise ConfigError(
            "disk filter='channel_byte_shuffle' needs buffers of one shape, a row a token; set it to 'auto'"
        )
    return PageFilter("channel_byte_shuffle", widths.pop(), page_tokens, channels)
