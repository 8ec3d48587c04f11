"""The keys of a block that any row sees, some at a time."""

from __future__ import annotations

from .pair import Pair, once
from .tiles import tiles


@once
def stretches_of_keys(pair: Pair, most: int) -> list[tuple[slice, Pair]]:
    """Stretches of at most `most` keys, each with the block it makes, from the first key that is seen to the last.

    Where only the device knows which, it is one stretch of all.
    """
    keys = pair.keys
    if pair.rows.runs is None or keys.runs is None:
        return [(slice(0, len(keys)), pair)]
    seen = tiles(pair)
    if not seen:
        return []
    first, last = min(t.k0 for t in seen), max(t.k1 for t in seen)
    if first == 0 and last == len(keys) <= most:
        return [(slice(0, last), pair)]
    cuts = [(a, min(a + most, last)) for a in range(first, last, most)]
    return [(slice(a, b), Pair(pair.rows, keys.cut(a, b), pair.reach)) for a, b in cuts]
