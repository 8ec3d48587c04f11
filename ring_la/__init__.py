"""ring_la: one sequence over many GPUs, every layer kind of a hybrid model, exact gradients.

cp = ring_la.ContextParallel(group)
layout = cp.layout(seq_len, kind="zigzag")
out = ring_la.gated_delta_rule(q, k, v, g, beta, layout=layout)
"""

from . import reference
from .capture import Buckets, capture
from .context import ContextParallel, ShardedLayout
from .conv import short_conv, token_shift
from .errors import (
    ArgumentError,
    DisagreementError,
    PeerError,
    RingLAError,
    SecondDerivativeError,
    UnsupportedError,
)
from .grouped_gemm import grouped_gemm
from .outputs import AttentionOutput, LinearAttentionOutput, ShortConvOutput, TokenShiftOutput
from .recurrences import (
    delta_rule,
    dplr_delta_rule,
    gated_delta_rule,
    gla,
    hgrn2,
    kda,
    lightning_attention,
    linear_attention,
    mamba2,
    retention,
    rwkv7,
    simple_gla,
)
from .softmax import attention
from .version import installed

__version__ = installed()

__all__ = [
    "ArgumentError",
    "AttentionOutput",
    "Buckets",
    "ContextParallel",
    "DisagreementError",
    "LinearAttentionOutput",
    "PeerError",
    "RingLAError",
    "SecondDerivativeError",
    "ShardedLayout",
    "ShortConvOutput",
    "TokenShiftOutput",
    "UnsupportedError",
    "attention",
    "capture",
    "delta_rule",
    "dplr_delta_rule",
    "gated_delta_rule",
    "gla",
    "grouped_gemm",
    "hgrn2",
    "kda",
    "lightning_attention",
    "linear_attention",
    "mamba2",
    "reference",
    "retention",
    "rwkv7",
    "short_conv",
    "simple_gla",
    "token_shift",
]
