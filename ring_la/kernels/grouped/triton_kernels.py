"""Device code of the grouped products: persistent tiles that find their group on the device.

    rows product    C[r] = A[r] · B[group of r]                        A [M, K], B [G, K, N], C [M, N]
    outer product   C[g] = Σ over the rows r of group g of A[r]ᵀ D[r]  A [M, K], D [M, N],    C [G, K, N]

`plan` turns the sizes into a table of row tiles, so the host never reads a size. Tiles may read past the end of
their group: the rows product never stores such rows, and the outer product, which sums over rows, takes the last,
partial block of a group through a mask. Sizes that overrun M are cut there, so that no size, however wrong,
addresses memory outside the tensors. Arguments that change from call to call are not specialised on, so a new
number of rows or groups compiles nothing.

With ``TMA`` the operands arrive as descriptors, which fill what lies outside the tensor with zeros; B and C are
three-dimensional there, so that a box never enters the next group. Otherwise they are pointers with strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = tl.constexpr(4)  # int32 words before the first entry of the plan: tiles, rows in groups, two unused
ENTRY = tl.constexpr(4)  # int32 words an entry: group, first row, end of the group's rows, one unused


@triton.jit(do_not_specialize=["M", "G"])
def plan(sizes, table, M, G, BLOCK_M: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr):
    """The table of row tiles: for each its group, its first row, and where the group's rows end."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    group = tl.zeros([TILES], tl.int32)
    row = tl.zeros([TILES], tl.int32)
    end = tl.zeros([TILES], tl.int32)
    tiles_before = tl.full([], 0, tl.int32)
    rows_before = tl.full([], 0, tl.int64)
    for first in range(0, G, GROUPS):
        g = first + tl.arange(0, GROUPS)
        size = tl.maximum(tl.load(sizes + g, mask=g < G, other=0).to(tl.int64), 0)
        size = tl.minimum(size, M)
        upto = rows_before + tl.cumsum(size, 0)
        row_start = tl.minimum(upto - size, M).to(tl.int32)
        row_end = tl.minimum(upto, M).to(tl.int32)
        count = (row_end - row_start + BLOCK_M - 1) // BLOCK_M
        tile_end = tiles_before + tl.cumsum(count, 0)
        into = tile[:, None] - (tile_end - count)[None, :]
        mine = (into >= 0) & (tile[:, None] < tile_end[None, :])
        group += tl.sum(tl.where(mine, g[None, :], 0), 1)
        row += tl.sum(tl.where(mine, row_start[None, :] + into * BLOCK_M, 0), 1)
        end += tl.sum(tl.where(mine, row_end[None, :], 0), 1)
        tiles_before += tl.sum(count, 0)
        rows_before += tl.sum(size, 0)
    entry = table + HEADER + tile * ENTRY
    known = tile < tiles_before
    tl.store(entry, group, mask=known)
    tl.store(entry + 1, row, mask=known)
    tl.store(entry + 2, end, mask=known)
    if tl.program_id(0) == 0:
        tl.store(table, tiles_before)
        tl.store(table + 1, tl.minimum(rows_before, M).to(tl.int32))


@triton.jit
def zero_rows(c, stride_cm, first, M, N, program, PROGRAMS, BLOCK: tl.constexpr):
    """Write zeros to the rows `first` … M of C, the programs taking turns."""
    for index in range(first + program, M, PROGRAMS):
        row = tl.full([], 0, tl.int64) + index
        for col in range(0, N, BLOCK):
            cols = col + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], c.dtype.element_ty)
            tl.store(c + row * stride_cm + cols, zeros, mask=cols < N)


@triton.jit(do_not_specialize=["M", "G"])
def zero_tail(c, ends, stride_cm, M, N, G, BLOCK: tl.constexpr):
    """Zero the rows of C past the last group; `ends` [G] are the cumulative sizes."""
    first = tl.minimum(tl.maximum(tl.load(ends + G - 1), 0), M).to(tl.int32)
    zero_rows(c, stride_cm, first, M, N, tl.program_id(0), tl.num_programs(0), BLOCK)


@triton.jit
def swizzle(tile, num_m, num_n, BAND: tl.constexpr):
    """Walk the tiles in bands of `BAND` row tiles, columns inside, so that what a wave reads stays in L2."""
    first = (tile // (BAND * num_n)) * BAND
    rows = tl.minimum(num_m - first, BAND)
    within = tile % (BAND * num_n)
    return first + within % rows, within // rows


@triton.jit
def store_rows(c, acc, row, end, col, N, stride_cm, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    where = c + rows.to(tl.int64)[:, None] * stride_cm + cols[None, :]
    tl.store(where, acc.to(c.dtype.element_ty), mask=(rows < end)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["M", "PROGRAMS"])
def rows_product(
    a, b, c, table, M, N, K,
    stride_am, stride_bg, stride_bk, stride_bn, stride_cm, PROGRAMS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    TMA: tl.constexpr, B_BY_COLUMNS: tl.constexpr, FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """C[r] = A[r] · B[group of r]. ``B_BY_COLUMNS``: each B[g] is stored column by column (descriptor [G, N, K])."""
    program = tl.program_id(0)
    num_m = tl.load(table)
    num_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    zero_rows(c, stride_cm, tl.load(table + 1), M, N, program, PROGRAMS, 1024)
    # The epilogue finds its tile anew: a value that crosses from the loads to the store would hinder pipelining.
    done = program - PROGRAMS
    for tile in tl.range(program, num_m * num_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = swizzle(tile, num_m, num_n, BAND)
        group = tl.load(table + HEADER + tile_m * ENTRY)
        row = tl.load(table + HEADER + tile_m * ENTRY + 1)
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            k = step * BLOCK_K
            if TMA:
                x = a.load([row, k])
                if B_BY_COLUMNS:
                    y = b.load([group, col, k]).reshape(BLOCK_N, BLOCK_K).T
                else:
                    y = b.load([group, k, col]).reshape(BLOCK_K, BLOCK_N)
            else:
                rows = row + tl.arange(0, BLOCK_M)
                cols = col + tl.arange(0, BLOCK_N)
                inner = k + tl.arange(0, BLOCK_K)
                x = tl.load(
                    a + rows.to(tl.int64)[:, None] * stride_am + inner[None, :],
                    mask=(rows < M)[:, None] & (inner < K)[None, :],
                    other=0.0,
                )
                y = tl.load(
                    b
                    + group.to(tl.int64) * stride_bg
                    + inner.to(tl.int64)[:, None] * stride_bk
                    + cols.to(tl.int64)[None, :] * stride_bn,
                    mask=(inner < K)[:, None] & (cols < N)[None, :],
                    other=0.0,
                )
            acc = tl.dot(x, y, acc, input_precision=PRECISION)

        done += PROGRAMS
        tile_m, tile_n = swizzle(done, num_m, num_n, BAND)
        row = tl.load(table + HEADER + tile_m * ENTRY + 1)
        end = tl.load(table + HEADER + tile_m * ENTRY + 2)
        col = tile_n * BLOCK_N
        store_rows(c, acc, row, end, col, N, stride_cm, BLOCK_M, BLOCK_N)


@triton.jit
def load_rows(x, row, end, col, width, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A block of rows through pointers; rows from `end` on and columns from `width` on are zero."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    inside = (rows < end)[:, None] & (cols < width)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["M", "G", "PROGRAMS"])
def outer_product(
    a_rows, d_rows, a, d, c, ends, M, N, K, G, stride_am, stride_dm, PROGRAMS,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[g] = Σ A[r]ᵀ D[r] over the rows of group g; `BLOCK_M` × `BLOCK_N` of C [K, N], `BLOCK_K` rows a step.

    `a_rows`, `d_rows` are descriptors (or None), `a`, `d` the same tensors as pointers, for the masked last block.
    """
    num_m = tl.cdiv(K, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    per_group = num_m * num_n
    for tile in range(tl.program_id(0), G * per_group, PROGRAMS):
        group = tile // per_group
        tile_m, tile_n = swizzle(tile % per_group, num_m, num_n, BAND)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        start = tl.load(ends + group - 1, mask=group > 0, other=0)
        start = tl.minimum(tl.maximum(start, 0), M)
        end = tl.minimum(tl.maximum(tl.load(ends + group), start), M)
        whole = (end - start) // BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(whole):
            first = start + step * BLOCK_K
            if TMA:
                x = a_rows.load([first, row])
                y = d_rows.load([first, col])
            else:
                x = load_rows(a, first, end, row, K, stride_am, BLOCK_K, BLOCK_M)
                y = load_rows(d, first, end, col, N, stride_dm, BLOCK_K, BLOCK_N)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        # The next rows belong to another group, or to none: they may hold anything, NaN included, so both are masked.
        last = start + whole * BLOCK_K
        if last < end:
            x = load_rows(a, last, end, row, K, stride_am, BLOCK_K, BLOCK_M)
            y = load_rows(d, last, end, col, N, stride_dm, BLOCK_K, BLOCK_N)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)

        block = c + group.to(tl.int64) * K * N
        store_rows(block, acc, row, K, col, N, N, BLOCK_M, BLOCK_N)
