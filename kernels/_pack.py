"""The kernels of `hicache.kernels.pack`. The docstring of that module has the format of a tile. One program handles one
tile.

A tile has 16 parts: part i has the tokens 16 t + i, for all t. A word has the values of channels 2p and 2p + 1, each in
one half of 16 bits (a "lane"), so that one operation handles both values.
"""

from __future__ import annotations

from hicache.kernels._triton import jit, tl


@jit
def _either(a, b):
    return a | b


@jit
def _two_lanes(bytes_of_two):
    # Move two bytes, read as 16 bits, to one lane each.
    wide = bytes_of_two.to(tl.uint32)
    return (wide | (wide << 8)) & 0x00FF00FF


@jit
def _locate(
    staging,
    table,
    page_stride,
    layer_stride,
    first_layer,
    BUFFERS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    # Program (p * TILES + b, q): page p, tile b of buffer q % BUFFERS of layer q // BUFFERS of the group, so that
    # programs which run concurrently read the same rows of the pool. Returns the tile's first channel in the pool, its
    # bytes in staging, its maximum number of escapes, and its page.
    # Rows 0 to 2 of the table: offset within a layer of a page, bytes of a tile, escapes of a tile.
    # Row 3 + l: addresses of layer l's buffers.
    layer = (tl.program_id(1) // BUFFERS).to(tl.int64)
    buffer, block = tl.program_id(1) % BUFFERS, tl.program_id(0) % TILES
    page = (tl.program_id(0) // TILES).to(tl.int64)
    pool = tl.load(table + (3 + first_layer + layer) * BUFFERS + buffer).to(tl.pointer_type(tl.uint16)) + block * WIDTH
    tile = staging + page * page_stride + layer * layer_stride + tl.load(table + buffer)
    tile += block * tl.load(table + BUFFERS + buffer)
    limit = tl.load(table + 2 * BUFFERS + buffer)
    # Tell the compiler the alignment of values from a table, which it cannot infer.
    return tl.multiple_of(pool, ALIGNED), tl.multiple_of(tile, ALIGNED), tl.multiple_of(limit, 16), page


@jit
def _known(row_words, ALIGNED: tl.constexpr):
    # Returns `row_words` unchanged, in a form that shows the compiler the alignment `ALIGNED`.
    return row_words // (ALIGNED // 4) * (ALIGNED // 4)


@jit
def _rows(pool, slots, row_words, part, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    # Return the addresses of the words of one part of the tile.
    slot = tl.load(slots + 16 * tl.arange(0, ROWS) + part)
    pair = tl.arange(0, WIDTH // 2)
    return pool.to(tl.pointer_type(tl.uint32)) + slot[:, None] * row_words + pair[None, :]


@jit
def _is_escape(codes, BITS: tl.constexpr):
    # Each lane has four codes. Return words in which bit 4n of a lane is set if code n is an escape.
    found = codes & (codes >> 1) & (codes >> 2)
    if BITS == 4:
        found &= codes >> 3
    return found & 0x11111111


@jit
def _escapes(codes0, codes1, codes2, codes3, BITS: tl.constexpr):
    # Return words in which bit 4n + k of a lane is set if code n of `codes<k>` is an escape.
    low = _is_escape(codes0, BITS) | (_is_escape(codes1, BITS) << 1)
    return low | (_is_escape(codes2, BITS) << 2) | (_is_escape(codes3, BITS) << 3)


@jit
def _positions(escaped):
    # Return, for both lanes, the index of the lane's first escape in the list of escapes; and the number of escapes.
    size: tl.constexpr = escaped.shape[0] * escaped.shape[1]
    count = escaped - ((escaped >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (count + (count >> 4)) & 0x0F0F0F0F
    count = (count + (count >> 8)) & 0x00FF00FF
    of_first, of_both = (count & 0xFF).to(tl.int32), ((count & 0xFF) + (count >> 16)).to(tl.int32)
    seen = tl.reshape(tl.cumsum(tl.reshape(of_both, [size]), 0), escaped.shape) - of_both
    return seen, seen + of_first, tl.sum(tl.reshape(of_both, [size]), 0)


@jit
def _fractions(even, odd):
    # Combine signs and mantissas of two parts. The part `even` is in the low byte of each lane.
    low = ((even >> 8) & 0x00800080) | (even & 0x007F007F)
    return low | (odd & 0x80008000) | ((odd & 0x007F007F) << 8)


@jit
def _code(bits, largest, BITS: tl.constexpr):
    ESCAPE: tl.constexpr = (1 << BITS) - 1
    # no lane borrows, because no exponent is above the largest one of its channel
    distance = largest[None, :] - ((bits >> 7) & 0x00FF00FF)
    is_far = ((distance + (0x8000 - ESCAPE) * 0x10001) >> 15) & 0x00010001
    return (distance & (ESCAPE * 0x10001)) | (is_far * ESCAPE)


@jit
def _pack_four(
    fractions, largest, pool, slots, row_words, part, WIDTH: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr
):
    # Returns the codes of parts `part` to `part` + 3 and stores their fractions at `fractions`. All loads precede the
    # stores, because the compiler cannot move a load before a store that may have the same address.
    at = tl.arange(0, ROWS)[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    bits0 = tl.load(_rows(pool, slots, row_words, part, WIDTH, ROWS))
    bits1 = tl.load(_rows(pool, slots, row_words, part + 1, WIDTH, ROWS))
    bits2 = tl.load(_rows(pool, slots, row_words, part + 2, WIDTH, ROWS))
    bits3 = tl.load(_rows(pool, slots, row_words, part + 3, WIDTH, ROWS))
    tl.store(fractions + at, _fractions(bits0, bits1))
    tl.store(fractions + ROWS * (WIDTH // 2) + at, _fractions(bits2, bits3))
    low = _code(bits0, largest, BITS) | (_code(bits1, largest, BITS) << 4)
    return low | (_code(bits2, largest, BITS) << 8) | (_code(bits3, largest, BITS) << 12)


@jit
def _store_codes(distances, codes0, codes1, codes2, codes3, BITS: tl.constexpr):
    # With 3 bits, bit k of the last codes is the highest of codes<k>.
    plane: tl.constexpr = codes0.shape[0] * codes0.shape[1]
    at = tl.arange(0, codes0.shape[0])[:, None] * codes0.shape[1] + tl.arange(0, codes0.shape[1])[None, :]
    if BITS == 3:
        codes0 |= (codes3 << 3) & 0x88888888
        codes1 |= (codes3 << 2) & 0x88888888
        codes2 |= (codes3 << 1) & 0x88888888
    else:
        tl.store(distances + 3 * plane + at, codes3)
    tl.store(distances + at, codes0)
    tl.store(distances + plane + at, codes1)
    tl.store(distances + 2 * plane + at, codes2)


@jit
def _load_codes(distances, at, plane: tl.constexpr, BITS: tl.constexpr):
    codes0, codes1 = tl.load(distances + at), tl.load(distances + plane + at)
    codes2 = tl.load(distances + 2 * plane + at)
    if BITS == 3:
        codes3 = ((codes0 >> 3) & 0x11111111) | ((codes1 >> 2) & 0x22222222) | ((codes2 >> 1) & 0x44444444)
        codes0, codes1, codes2 = codes0 & 0x77777777, codes1 & 0x77777777, codes2 & 0x77777777
    else:
        codes3 = tl.load(distances + 3 * plane + at)
    return codes0, codes1, codes2, codes3


@jit
def _store_escapes(escapes, limit, escaped, pool, slots, row_words, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    # Stores the exponents of escapes and returns their number.
    size: tl.constexpr = ROWS * (WIDTH // 2)
    parts = tl.reduce(tl.reshape(escaped, [size]), 0, _either)
    num_escapes = 0
    if parts != 0:
        parts |= parts >> 16
        first, second, num_escapes = _positions(escaped)
        for part in tl.static_range(16):
            bit = 4 * (part % 4) + part // 4
            if (parts >> bit) & 1 != 0:
                bits = tl.load(_rows(pool, slots, row_words, part, WIDTH, ROWS))
                in_first, in_second = ((escaped >> bit) & 1).to(tl.int32), ((escaped >> (16 + bit)) & 1).to(tl.int32)
                tl.store(escapes + first, ((bits >> 7) & 0xFF).to(tl.uint8), (in_first > 0) & (first < limit))
                tl.store(escapes + second, ((bits >> 23) & 0xFF).to(tl.uint8), (in_second > 0) & (second < limit))
                first += in_first
                second += in_second
    return num_escapes


@jit(
    do_not_specialize=["page_stride", "layer_stride", "row_words", "first_layer"],
    do_not_specialize_on_alignment=["table", "slots", "misfits"],
)
def pack_kernel(
    staging,
    table,
    slots,
    misfits,
    page_stride,
    layer_stride,
    row_words,
    first_layer,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    ROWS: tl.constexpr = PAGE // 16
    pool, tile, limit, page = _locate(
        staging, table, page_stride, layer_stride, first_layer, BUFFERS, TILES, WIDTH, ALIGNED
    )
    slots += page * PAGE
    row_words = _known(row_words, ALIGNED)

    first = tl.zeros([ROWS, WIDTH // 2], dtype=tl.uint32)
    second = tl.zeros([ROWS, WIDTH // 2], dtype=tl.uint32)
    for part in tl.static_range(16):
        bits = tl.load(_rows(pool, slots, row_words, part, WIDTH, ROWS))
        first, second = tl.maximum(first, bits & 0x7F80), tl.maximum(second, bits & 0x7F800000)
    largest = (tl.max(first, axis=0) | tl.max(second, axis=0)) >> 7
    tops = (largest | (largest >> 8)) & 0xFFFF
    tl.store(tile.to(tl.pointer_type(tl.uint16)) + tl.arange(0, WIDTH // 2), tops.to(tl.uint16))

    fractions = (tile + WIDTH + limit).to(tl.pointer_type(tl.uint32))
    step: tl.constexpr = 2 * ROWS * (WIDTH // 2)
    codes0 = _pack_four(fractions, largest, pool, slots, row_words, 0, WIDTH, ROWS, BITS)
    codes1 = _pack_four(fractions + step, largest, pool, slots, row_words, 4, WIDTH, ROWS, BITS)
    codes2 = _pack_four(fractions + 2 * step, largest, pool, slots, row_words, 8, WIDTH, ROWS, BITS)
    codes3 = _pack_four(fractions + 3 * step, largest, pool, slots, row_words, 12, WIDTH, ROWS, BITS)
    escaped = _escapes(codes0, codes1, codes2, codes3, BITS)
    _store_codes(fractions + 4 * step, codes0, codes1, codes2, codes3, BITS)
    if _store_escapes(tile + WIDTH, limit, escaped, pool, slots, row_words, WIDTH, ROWS) > limit:
        tl.atomic_add(misfits + page, 1)


@jit
def _with_escapes(exponents, list, limit, escaped, first, second):
    # Returns `exponents`, in which the exponents of escapes are replaced by those in `list`, and the next index in
    # `list` for both lanes. `escaped`: the lowest bit of each lane is set if the lane's value is an escape.
    in_first, in_second = (escaped & 1).to(tl.int32), ((escaped >> 16) & 1).to(tl.int32)
    low = tl.load(list + first, mask=(in_first > 0) & (first < limit), other=0).to(tl.uint32)
    high = tl.load(list + second, mask=(in_second > 0) & (second < limit), other=0).to(tl.uint32)
    exponents = tl.where(in_first > 0, (exponents & 0xFFFF0000) | low, exponents)
    exponents = tl.where(in_second > 0, (exponents & 0xFFFF) | (high << 16), exponents)
    return exponents, first + in_first, second + in_second


@jit(
    do_not_specialize=["page_stride", "layer_stride", "row_words", "first_layer"],
    do_not_specialize_on_alignment=["table", "slots"],
)
def unpack_kernel(
    staging,
    table,
    slots,
    page_stride,
    layer_stride,
    row_words,
    first_layer,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    ROWS: tl.constexpr = PAGE // 16
    plane: tl.constexpr = ROWS * (WIDTH // 2)
    pool, tile, limit, page = _locate(
        staging, table, page_stride, layer_stride, first_layer, BUFFERS, TILES, WIDTH, ALIGNED
    )
    slots += page * PAGE
    row_words = _known(row_words, ALIGNED)
    at = tl.arange(0, ROWS)[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    fractions = (tile + WIDTH + limit).to(tl.pointer_type(tl.uint32))
    codes0, codes1, codes2, codes3 = _load_codes(fractions + 8 * plane, at, plane, BITS)
    largest = _two_lanes(tl.load(tile.to(tl.pointer_type(tl.uint16)) + tl.arange(0, WIDTH // 2)))
    escaped = _escapes(codes0, codes1, codes2, codes3, BITS)
    parts = tl.reduce(tl.reshape(escaped, [plane]), 0, _either)
    first, second = tl.zeros([ROWS, WIDTH // 2], dtype=tl.int32), tl.zeros([ROWS, WIDTH // 2], dtype=tl.int32)
    if parts != 0:
        parts |= parts >> 16
        first, second, _ = _positions(escaped)

    fraction = tl.zeros([ROWS, WIDTH // 2], dtype=tl.uint32)
    for part in tl.static_range(16):
        exponents = largest[None, :] - ((codes0 >> (4 * (part % 4))) & 0x000F000F)
        bit = 4 * (part % 4) + part // 4
        if (parts >> bit) & 1 != 0:
            exponents, first, second = _with_escapes(exponents, tile + WIDTH, limit, escaped >> bit, first, second)
        if part % 2 == 0:
            fraction = tl.load(fractions + part // 2 * plane + at)
            bits = ((fraction & 0x00800080) << 8) | (exponents << 7) | (fraction & 0x007F007F)
        else:
            bits = (fraction & 0x80008000) | (exponents << 7) | ((fraction >> 8) & 0x007F007F)
        tl.store(_rows(pool, slots, row_words, part, WIDTH, ROWS), bits)
        if part % 4 == 3:
            codes0, codes1, codes2 = codes1, codes2, codes3
