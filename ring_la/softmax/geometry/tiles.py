"""Which rectangles of a block a kernel must compute: the parts that are wholly masked are never touched.

For rows at a common stride, the keys row i sees are the columns j with ``lo ≤ j − i ≤ hi``: a *band*. Neighbouring
rectangles are joined where one kernel call can do both, since calls should be few and large:

    zigzag, rank r, keys of rank s:   s < r  all rows × the keys' first half        (full)
                                      s = r  all rows × all keys, causal            (band, hi = 0)
                                      s > r  the rows' second half × all keys       (full)
"""

from __future__ import annotations

from typing import NamedTuple

from .pair import Pair, Reach, once
from .tokens import ANY_DOCUMENT, Run, Tokens


class Tile(NamedTuple):
    """Rows ``q0 … q1−1`` against keys ``k0 … k1−1``.

    Column j is seen by row i (counted inside the tile) iff ``lo ≤ j − i ≤ hi``; None: unbounded. With `band` False
    the pairs seen follow no band, and the mask must be formed from documents and positions.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int | None = None
    hi: int | None = None
    band: bool = True

    @property
    def full(self) -> bool:
        """Whether every row sees every key."""
        return self.band and self.lo is None and self.hi is None

    @property
    def rows(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)


@once
def tiles(pair: Pair) -> list[Tile]:
    """The rectangles that hold every visible pair of rows, each once."""
    tq, tk = pair.rows, pair.keys
    if not len(tq) or not len(tk):
        return []
    if tq.runs is None or tk.runs is None:
        return [Tile(0, len(tq), 0, len(tk), band=False)]
    out: list[Tile] = []
    for document, rows in tq.by_document.items():
        keys = tk.by_document.get(document, []) + tk.by_document.get(ANY_DOCUMENT, [])
        out += _square(pair.reach, tq, rows, keys) or _document(pair.reach, rows, keys)
    return out


@once
def squares(pair: Pair) -> list[Tile]:
    """The same, of full tiles and squares alone; see `square`."""
    return [s for t in tiles(pair) for s in square(t)]


def sees(pair: Pair) -> bool:
    """Whether any query sees any key, as far as the host knows."""
    return bool(tiles(pair))


def _square(reach: Reach, tq: Tokens, rows: list[Run], keys: list[Run]) -> list[Tile]:
    """One tile where the rows are the keys and order is all the mask asks; else none."""
    same = [(r.offset, r.length, r.index) for r in rows] == [(k.offset, k.length, k.index) for k in keys]
    aligned = all(r.position == k.position and r.document == k.document for r, k in zip(rows, keys))
    gapless = all(a.offset + a.length == b.offset for a, b in zip(rows, rows[1:]))
    if not (same and aligned and gapless and tq.ordered) or reach.windowed:
        return []
    a, b = rows[0].offset, rows[-1].offset + rows[-1].length
    return [Tile(a, b, a, b, hi=None if reach.right is None else 0)]


def _document(reach: Reach, rows: list[Run], keys: list[Run]) -> list[Tile]:
    out: list[Tile] = []
    for row in rows:
        line: list[Tile] = []
        for key in keys:
            tile = _pair(reach, row, key)
            if tile is not None:
                line = [*line[:-1], *_beside(line[-1], tile)] if line else [tile]
        for tile in line:
            out = [*out[:-1], *_below(out[-1], tile)] if out else [tile]
    return out


def _pair(reach: Reach, q: Run, k: Run) -> Tile | None:
    """The part of two runs that holds their visible pairs."""
    nearest, farthest = k.position - q.last, k.last - q.position  # smallest and largest p_j − p_i
    left, right = reach
    if (right is not None and nearest > right) or (left is not None and farthest < -left):
        return None
    if (right is None or farthest <= right) and (left is None or nearest >= -left):
        return Tile(q.offset, q.offset + q.length, k.offset, k.offset + k.length)
    if q.stride != k.stride:
        return Tile(q.offset, q.offset + q.length, k.offset, k.offset + k.length, band=False)
    apart, s = k.position - q.position, q.stride
    hi = None if right is None else (right - apart) // s
    lo = None if left is None else -((left + apart) // s)
    return trim(Tile(q.offset, q.offset + q.length, k.offset, k.offset + k.length, lo, hi))


def trim(t: Tile) -> Tile | None:
    """A band tile without the rows and columns that hold no visible pair, and without bounds that bind nowhere."""
    n, m, lo, hi = t.q1 - t.q0, t.k1 - t.k0, t.lo, t.hi
    if lo is not None and hi is not None and lo > hi:  # a window narrower than the stride
        return None
    first_row = 0 if hi is None else max(0, -hi)
    last_row = n - 1 if lo is None else min(n - 1, m - 1 - lo)
    if first_row > last_row:
        return None
    first_key = 0 if lo is None else max(0, first_row + lo)
    last_key = m - 1 if hi is None else min(m - 1, last_row + hi)
    if first_key > last_key:
        return None
    n, m, moved = last_row - first_row + 1, last_key - first_key + 1, first_row - first_key
    lo = None if lo is None or lo + moved <= 1 - n else lo + moved
    hi = None if hi is None or hi + moved >= m - 1 else hi + moved
    q0, k0 = t.q0 + first_row, t.k0 + first_key
    return Tile(q0, q0 + n, k0, k0 + m, lo, hi)


def _beside(a: Tile, b: Tile) -> list[Tile]:
    """Join two tiles of the same rows and neighbouring keys, the first one full, the second causal or full."""
    if a.full and b.band and b.lo is None and (a.q0, a.q1, a.k1) == (b.q0, b.q1, b.k0):
        return [Tile(a.q0, a.q1, a.k0, b.k1, None, None if b.hi is None else b.hi + a.k1 - a.k0)]
    return [a, b]


def _below(a: Tile, b: Tile) -> list[Tile]:
    """Join two full tiles of the same keys and neighbouring rows."""
    if a.full and b.full and (a.k0, a.k1, a.q1) == (b.k0, b.k1, b.q0):
        return [Tile(a.q0, b.q1, a.k0, a.k1)]
    return [a, b]


def square(t: Tile) -> list[Tile]:
    """A full or causal tile as full tiles and squares with ``hi = 0``, for kernels whose causal mask starts at 0, 0."""
    if t.full:
        return [t]
    if not t.band or t.lo is not None or t.hi < 0:
        raise AssertionError(f"not a trimmed causal tile: {t}")
    side = min(t.q1 - t.q0, t.k1 - t.k0 - t.hi)
    out = [Tile(t.q0, t.q1, t.k0, t.k0 + t.hi)] if t.hi else []
    out.append(Tile(t.q0, t.q0 + side, t.k0 + t.hi, t.k0 + t.hi + side, hi=0))
    if t.q0 + side < t.q1:
        out.append(Tile(t.q0 + side, t.q1, t.k0 + t.hi, t.k1))
    return out


def strips(t: Tile, rows: int) -> list[Tile]:
    """A tile cut into strips of at most `rows` rows, each trimmed to the keys it sees."""
    out = []
    for a in range(t.q0, t.q1, rows):
        b, down = min(t.q1, a + rows), a - t.q0
        if not t.band:
            out.append(t._replace(q0=a, q1=b))
            continue
        lo, hi = (None if x is None else x + down for x in (t.lo, t.hi))
        strip = trim(Tile(a, b, t.k0, t.k1, lo, hi))
        if strip is not None:
            out.append(strip)
    return out
