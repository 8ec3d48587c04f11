"""ring_la: one sequence over many GPUs, every layer kind of a hybrid model, exact gradients.

cp = ring_la.ContextParallel(group)
layout = cp.layout(seq_len, kind="zigzag")
out = ring_la.gated_delta_rule(q, k, v, g, beta, layout=layout)
"""

from . import recurrences, reference
from .blockwise import by_block
from .capturing import Buckets, capture
from .context import ContextParallel, GridLayout, Halo, ShardedLayout
from .conv import short_conv, token_shift
from .errors import (
    ArgumentError,
    DisagreementError,
    NotFiniteError,
    PeerError,
    RingLAError,
    SecondDerivativeError,
    UnsupportedError,
)
from .grouped_gemm import grouped_gemm
from .log_linear import log_linear_attention
from .nans import find_nans
from .nsa import nsa
from .outputs import AttentionOutput, LinearAttentionOutput, MLAOutput, NSAOutput, ShortConvOutput, TokenShiftOutput
from .recurrences import *  # noqa: F403  one function each of RECURRENCES
from .softmax import attention, forgetting_attention, mla, sparse_attention
from .version import installed

__version__ = installed()

__all__ = [
    "ArgumentError",
    "AttentionOutput",
    "Buckets",
    "ContextParallel",
    "DisagreementError",
    "GridLayout",
    "Halo",
    "LinearAttentionOutput",
    "MLAOutput",
    "NSAOutput",
    "NotFiniteError",
    "PeerError",
    "RingLAError",
    "SecondDerivativeError",
    "ShardedLayout",
    "ShortConvOutput",
    "TokenShiftOutput",
    "UnsupportedError",
    "attention",
    "by_block",
    "capture",
    "find_nans",
    "forgetting_attention",
    "grouped_gemm",
    "log_linear_attention",
    "mla",
    "nsa",
    "reference",
    "short_conv",
    "sparse_attention",
    "token_shift",
]
__all__ += recurrences.__all__
