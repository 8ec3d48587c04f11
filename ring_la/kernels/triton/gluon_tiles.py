"""Device helpers of the kernels in Gluon for Hopper: 4 warps, tiles in shared memory, products by warp group."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def chunk_here(table, T, H: gl.constexpr, C: gl.constexpr, VARLEN: gl.constexpr):
    """(number, head, batch, first token, tokens) of a program's chunk; its heads side by side, as in memory."""
    s = gl.program_id(0) // H
    if VARLEN:
        start = gl.load(table + s * 6)
        end = gl.load(table + s * 6 + 1)
    else:
        start = s * C
        end = gl.minimum(start + C, T)
    return s, gl.program_id(0) % H, gl.program_id(1), start, end - start


@gluon.jit
def span_here(table, s, T, LENGTH, C: gl.constexpr, VARLEN: gl.constexpr):
    """(first token, end, piece, number of the first chunk, is last) of span `s`; see `tiles.span`."""
    if VARLEN:
        row = table + s * 6
        start = gl.load(row)
        end = gl.load(row + 1)
        piece = gl.load(row + 2)
        chunk = gl.load(row + 3)
        last = gl.load(row + 5) != 0
    else:
        start = s * LENGTH
        end = gl.minimum(start + LENGTH, T)
        piece = 0
        chunk = start // C
        last = end == T
    return start, end, piece, chunk, last


@gluon.jit
def ask(to, p, n, D: gl.constexpr, STRIDE: gl.constexpr):
    """Start to copy a tile of rows D wide to shared memory; rows from n on are zero."""
    ROWS: gl.constexpr = to.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, D, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(to, p + r[:, None] * STRIDE + c[None, :], mask=(r < n)[:, None])


@gluon.jit
def ask_whole(to, p, D: gl.constexpr, STRIDE: gl.constexpr, zero=0):
    """`ask` for a state, whose rows are all there. With a `zero` the compiler does not know addresses are made here,
    and not held since they were first made."""
    ROWS: gl.constexpr = to.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) + zero
    c = gl.arange(0, D, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(to, p + r[:, None] * STRIDE + c[None, :])


@gluon.jit
def arrived(OUTSTANDING: gl.constexpr):
    """All but the last OUTSTANDING groups of copies are there, for every warp and for products."""
    async_copy.wait_group(OUTSTANDING)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def put(p, x, n, D: gl.constexpr, STRIDE: gl.constexpr, zero=0):
    """Store n rows of an accumulator, 16 bytes a thread; `zero` as for `ask_whole`."""
    ROWS: gl.constexpr = x.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([D // 16, 8], [256 // D, D // 8], [4, 1], [1, 0])
    x = gl.convert_layout(x.to(p.dtype.element_ty), layout)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) + zero
    c = gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(p + r[:, None] * STRIDE + c[None, :], x, mask=(r < n)[:, None])


@gluon.jit
def put_by(tile, p, x, n, STRIDE: gl.constexpr):
    """Store n rows of an accumulator by a tile of its shape in shared memory, 16 bytes a thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile.store(x.to(p.dtype.element_ty))
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    gl.store(p + r[:, None] * STRIDE + c[None, :], tile.load(layout), mask=(r < n)[:, None])


@gluon.jit
def product(a, b, like):
    """a bᵀ, started."""
    return warpgroup_mma(a, b.permute((1, 0)), like, use_acc=False, is_async=True)


@gluon.jit
def weights(seen, gap):
    """Factors of pairs, from the logarithms of their decays."""
    return gl.exp2(gl.where(seen, gap, float("-inf")))


@gluon.jit
def widened(x):
    """x in fp32; bf16 by one instruction a number."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def passing(S, R, layout: gl.constexpr):
    """<S, R> by row."""
    return gl.sum(widened(S.load(layout)) * widened(R.load(layout)), 1)
