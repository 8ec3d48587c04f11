"""Arithmetic whose bits do not depend on how a sequence is split or packed.

    blocks   where the blocks of a rank are: 64 tokens at fixed places of each document, whole on one rank
    rows     by_block: code that maps each token by itself, run block by block, always on the same shape
    linear   linear: the same for a matrix product, without a graph of its own for every block
    sums     sums over blocks, tokens and ranks, exact and so of the same bits in any order
    lookup   embedding, and the sum of a loss over tokens

The rule all of it follows: one block is always computed by the same operations on tensors of the same shapes, filled up
with zeros, so the choices a library makes by shape, alignment and place cannot differ; and what blocks give to a shared
gradient is added exactly.
"""

from .blocks import BLOCK, blocks_of, fixed
from .linear import linear
from .lookup import embedding, token_sum
from .rows import by_block, led_by_block
from .sums import exact_sum

__all__ = ["BLOCK", "blocks_of", "by_block", "embedding", "exact_sum", "fixed", "led_by_block", "linear", "token_sum"]
