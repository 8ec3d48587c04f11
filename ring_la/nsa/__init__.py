"""Native Sparse Attention (DeepSeek-AI 2025, arXiv 2502.11089), whole or on a split sequence.

function     nsa, the public function: checks, the three branches, their sum
compressed   blocks of tokens made one key and value each, wherever the sequence is cut, and attention to them
operators    what a compiler sees of it
choice       which blocks of tokens a query reads, by what it gives the compressed ones
"""

from .choice import Sizes
from .function import check_sizes, nsa

__all__ = ["Sizes", "check_sizes", "nsa"]
