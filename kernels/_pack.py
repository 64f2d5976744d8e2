"""The kernels of `hicache.kernels.pack`, whose module has the format of a tile: one program a tile.

Most of a tile's eighths (`PARTS`) have no escapes, so sums over the threads of a program are made for the others alone.
"""

from __future__ import annotations

from hicache.kernels._triton import jit, tl


@jit
def _exponent(bits):
    return (bits >> 7) & 0xFF


@jit
def _either(a, b):
    return a | b


@jit
def _rows(pool, slots, row_stride, column, inside, SUB: tl.constexpr):
    # The bits of SUB tokens' channels of the tile; `slots`: from those tokens on.
    slot = tl.load(slots + tl.arange(0, SUB))
    return tl.load(pool + slot[:, None] * row_stride + column[None, :], mask=inside, other=0).to(tl.int32)


@jit
def _store_escapes(
    escapes, limit, escaped_of, pool, slots, row_stride, column, inside, PARTS: tl.constexpr, SUB: tl.constexpr
):
    # Bit j of `escaped_of`: the code of part j is an escape. Returns how many there are.
    size: tl.constexpr = escaped_of.shape[0] * escaped_of.shape[1]
    escaped_parts = tl.reduce(tl.reshape(escaped_of, [size]), 0, _either)
    seen = 0
    for part in tl.static_range(PARTS):
        if (escaped_parts >> part) & 1 != 0:  # seldom, and the sums cost more than all else
            bits = _rows(pool, slots + part * SUB, row_stride, column, inside, SUB)
            escaped = tl.reshape((escaped_of >> part) & 1, [size])
            place = seen + tl.cumsum(escaped, 0) - escaped
            exponent = tl.reshape(_exponent(bits), [size]).to(tl.uint8)
            tl.store(escapes + place, exponent, mask=(escaped > 0) & (place < limit))
            seen += tl.sum(escaped, 0)
    return seen


@jit
def _load_escapes(escapes, limit, seen, code, exponent, ESCAPE: tl.constexpr):
    # The exponents of one part, those of escapes among them, and how many were seen so far.
    size: tl.constexpr = code.shape[0] * code.shape[1]
    escaped = tl.reshape((code == ESCAPE).to(tl.int32), [size])
    place = seen + tl.cumsum(escaped, 0) - escaped
    kept = tl.load(escapes + place, mask=(escaped > 0) & (place < limit), other=0).to(tl.int32)
    return tl.where(code == ESCAPE, tl.reshape(kept, code.shape), exponent), seen + tl.sum(escaped, 0)


@jit
def _locate(
    staging,
    table,
    page_stride,
    layer_stride,
    first_layer,
    BUFFERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGNED_16: tl.constexpr,
):
    # Program (p, q, b): page p, buffer q % BUFFERS of layer q // BUFFERS of the group, tile b. Returns the tile's first
    # channel in the pool, its bytes, and how many escapes it may have.
    # Rows 0 to 3 of the table: offset within a layer of a page, bytes of a tile, escapes of a tile and of the last one.
    # Row 4 + l: addresses of layer l's buffers.
    layer = (tl.program_id(1) // BUFFERS).to(tl.int64)
    buffer, block = tl.program_id(1) % BUFFERS, tl.program_id(2)
    pool = tl.load(table + (4 + first_layer + layer) * BUFFERS + buffer).to(tl.pointer_type(tl.uint16)) + block * COLS
    is_last = block == tl.num_programs(2) - 1
    limit = tl.load(table + (2 + is_last) * BUFFERS + buffer)
    tile = staging + tl.program_id(0).to(tl.int64) * page_stride + layer * layer_stride + tl.load(table + buffer)
    tile += block * tl.load(table + BUFFERS + buffer)
    if ALIGNED_16:  # the compiler does not know what is in the table
        pool, tile, limit = tl.multiple_of(pool, 16), tl.multiple_of(tile, 16), tl.multiple_of(limit, 16)
    return pool, tile, limit


@jit(do_not_specialize=["first_layer"], do_not_specialize_on_alignment=["table", "slots", "misfits"])
def pack_kernel(  # noqa: PLR0917 - Triton binds constants by position
    staging,
    table,
    slots,
    misfits,
    page_stride,
    layer_stride,
    row_stride,
    first_layer,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLS: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED_16: tl.constexpr,
):
    SUB: tl.constexpr = PAGE // PARTS
    ESCAPE: tl.constexpr = (1 << BITS) - 1
    pool, tile, limit = _locate(
        staging, table, page_stride, layer_stride, first_layer, BUFFERS, CHANNELS, COLS, ALIGNED_16
    )
    # Known to the compiler where all tiles are of one width, so that it reads and writes words.
    width = COLS if CHANNELS % COLS == 0 else min(COLS, CHANNELS - tl.program_id(2) * COLS)
    slots, column = slots + tl.program_id(0).to(tl.int64) * PAGE, tl.arange(0, COLS)
    inside, fractions = (column < width)[None, :], tile + width + limit
    at = tl.arange(0, SUB)[:, None] * width + column[None, :]

    largest = tl.zeros([SUB, COLS], dtype=tl.int32)
    for part in tl.static_range(PARTS):
        bits = _rows(pool, slots + part * SUB, row_stride, column, inside, SUB)
        largest = tl.maximum(largest, _exponent(bits))
    top = tl.max(largest, axis=0)
    tl.store(tile + column, top.to(tl.uint8), mask=column < width)

    planes = tl.zeros([SUB, COLS], dtype=tl.int32)  # byte k: bit k of the codes
    escaped_of = tl.zeros([SUB, COLS], dtype=tl.int32)
    for part in tl.static_range(PARTS):
        bits = _rows(pool, slots + part * SUB, row_stride, column, inside, SUB)
        fraction = ((bits >> 8) & 0x80) | (bits & 0x7F)
        tl.store(fractions + part * SUB * width + at, fraction.to(tl.uint8), mask=inside)
        code = tl.minimum(top[None, :] - _exponent(bits), ESCAPE)
        escaped_of |= ((code == ESCAPE) & inside).to(tl.int32) << part
        for k in tl.static_range(BITS):
            planes |= ((code >> k) & 1) << (8 * k + part)
    for k in tl.static_range(BITS):
        tl.store(fractions + (PAGE + k * SUB) * width + at, ((planes >> (8 * k)) & 0xFF).to(tl.uint8), mask=inside)
    seen = _store_escapes(tile + width, limit, escaped_of, pool, slots, row_stride, column, inside, PARTS, SUB)
    if seen > limit:
        tl.atomic_add(misfits + tl.program_id(0), 1)


@jit(do_not_specialize=["first_layer"], do_not_specialize_on_alignment=["table", "slots"])
def unpack_kernel(
    staging,
    table,
    slots,
    page_stride,
    layer_stride,
    row_stride,
    first_layer,
    BUFFERS: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLS: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED_16: tl.constexpr,
):
    SUB: tl.constexpr = PAGE // PARTS
    ESCAPE: tl.constexpr = (1 << BITS) - 1
    pool, tile, limit = _locate(
        staging, table, page_stride, layer_stride, first_layer, BUFFERS, CHANNELS, COLS, ALIGNED_16
    )
    width = COLS if CHANNELS % COLS == 0 else min(COLS, CHANNELS - tl.program_id(2) * COLS)
    slots, column = slots + tl.program_id(0).to(tl.int64) * PAGE, tl.arange(0, COLS)
    inside, fractions = (column < width)[None, :], tile + width + limit
    at = tl.arange(0, SUB)[:, None] * width + column[None, :]

    top = tl.load(tile + column, mask=column < width, other=0).to(tl.int32)
    planes = tl.zeros([SUB, COLS], dtype=tl.int32)
    all_set = tl.full([SUB, COLS], 0xFF, dtype=tl.int32)  # bit j: the code of part j is an escape
    for k in tl.static_range(BITS):
        plane = tl.load(fractions + (PAGE + k * SUB) * width + at, mask=inside, other=0).to(tl.int32)
        planes |= plane << (8 * k)
        all_set &= plane
    escaped_parts = tl.reduce(tl.reshape(all_set, [SUB * COLS]), 0, _either)

    seen = 0
    for part in tl.static_range(PARTS):
        code = tl.zeros([SUB, COLS], dtype=tl.int32)
        for k in tl.static_range(BITS):
            code |= ((planes >> (8 * k + part)) & 1) << k
        exponent = top[None, :] - code
        if (escaped_parts >> part) & 1 != 0:
            exponent, seen = _load_escapes(tile + width, limit, seen, code, exponent, ESCAPE)
        fraction = tl.load(fractions + part * SUB * width + at, mask=inside, other=0).to(tl.int32)
        bits = ((fraction & 0x80) << 8) | (exponent << 7) | (fraction & 0x7F)
        slot = tl.load(slots + part * SUB + tl.arange(0, SUB))
        tl.store(pool + slot[:, None] * row_stride + column[None, :], bits.to(tl.uint16), mask=inside)
