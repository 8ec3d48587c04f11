"""Short causal convolutions and token shift on a split sequence: a state that is just a tail.

Every piece (run of tokens of one document) is put behind the W−1 tokens before it, its *lead*: from the previous
segment by one neighbour message, from the document's initial state, or zeros. After that both operators are local.
Where a shard is shorter than the kernel the lead comes from several ranks at once.
"""

from .convolution import short_conv
from .leads import behind
from .shift import token_shift

__all__ = ["behind", "short_conv", "token_shift"]
