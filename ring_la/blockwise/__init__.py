"""Arithmetic whose bits do not depend on how a sequence is split or packed.

    blocks     where the blocks of a rank are: 64 tokens at fixed places of each document, whole on one rank
    rows       by_block: code that maps each token by itself, run block by block, always on the same shape
    linear     linear: the same for a matrix product, without a graph of its own for every block
    sums       sums over blocks, tokens and ranks, exact and so of the same bits in any order
    per_token  what tokens share, written out for each of them, and sums within a token
    lookup     embedding, and the sum of a loss over tokens
    switch     whether all blocks of a rank are one launch of kernels of which a row's bits do not depend on others
    together   norms, gates and the short convolution so

The rule all of it follows: one block is always computed by the same operations on tensors of the same shapes, filled up
with zeros, so the choices a library makes by shape, alignment and place cannot differ; and what blocks give to a shared
gradient is added exactly.
"""

from .blocks import BLOCK, blocks_of, fixed
from .linear import linear
from .lookup import embedding, token_sum
from .per_token import over, repeated, row_sum
from .rows import AT_ONCE, by_block, led_by_block
from .sums import exact_sum
from .switch import at_once, by_element
from .together import convolve_at_once, convolve_back_at_once, discretise_at_once, norm_at_once

__all__ = [
    "AT_ONCE",
    "BLOCK",
    "at_once",
    "blocks_of",
    "by_block",
    "by_element",
    "convolve_at_once",
    "convolve_back_at_once",
    "discretise_at_once",
    "embedding",
    "exact_sum",
    "fixed",
    "led_by_block",
    "linear",
    "norm_at_once",
    "over",
    "repeated",
    "row_sum",
    "token_sum",
]
