"""Where rows stand in the sequence, and which pairs of them meet. Nothing here computes attention.

tokens     the rows of one side of a block: index, document and position of each
pair       two sides under a mask, and what is kept with them
tiles      the rectangles of a pair that a kernel must compute
placement  where every rank's queries and keys stand, on one device and on a split sequence
"""

from .pair import Pair, Reach, once
from .tiles import Tile, sees, strips, tiles
from .tokens import ANY_DOCUMENT, Run, Tokens

__all__ = ["ANY_DOCUMENT", "Pair", "Reach", "Run", "Tile", "Tokens", "once", "sees", "strips", "tiles"]
