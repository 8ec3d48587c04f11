"""Which keys a query reads: indexers for `sparse_attention` and `mla(chosen=)`, on one device and on a split sequence.

    lightning   DeepSeek-V3.2's: a score of every earlier token by small heads of its own, and the loss that trains it
    blocks      blocks by their mean key: MoBA's and QSA's; by their best key: MiniMax-M3's

Index keys, small, go to every rank; scores are formed for some queries and some keys at a time and the best kept, so
that memory goes with what is chosen and never with T².
"""

from .blocks import best_key_index, block_index, full_block_index
from .chosen import Chosen
from .lightning import lightning_index, lightning_loss

__all__ = ["Chosen", "best_key_index", "block_index", "full_block_index", "lightning_index", "lightning_loss"]
