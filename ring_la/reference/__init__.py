"""The truth: every public function as an fp64 token loop, dense softmax, or plain sum.

The functions have the names of the public interface and its arguments, but for those that choose how a result is made
(`strategy`, `kv_layout`, `dropout_seed`, `form`, `output_latents`, `in_place`, a backend of `grouped_gemm`). They
follow the defining equation of each paper one token at a time, share nothing with the chunked kernels, and are
differentiable by plain autograd, so the true gradients come from them too. Everything is computed in, and returned as,
float64, on the device of the inputs.
They run on one device: `layout` must be None.
"""

from collections.abc import Iterable
from typing import Any

from ring_la.reference.forgetting import forgetting_attention
from ring_la.reference.latents import mla
from ring_la.reference.log_linear import log_linear_attention
from ring_la.reference.nsa import nsa
from ring_la.reference.recurrences import (
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
from ring_la.reference.softmax import attention
from ring_la.reference.sparse import sparse_attention
from ring_la.reference.token_wise import grouped_gemm, short_conv, token_shift
from ring_la.reference.ttt import ttt_linear

__all__ = [
    "attention",
    "delta_rule",
    "dplr_delta_rule",
    "forgetting_attention",
    "gated_delta_rule",
    "gla",
    "grouped_gemm",
    "hgrn2",
    "kda",
    "lightning_attention",
    "linear_attention",
    "log_linear_attention",
    "mamba2",
    "mla",
    "nsa",
    "retention",
    "rwkv7",
    "short_conv",
    "simple_gla",
    "sparse_attention",
    "token_shift",
    "ttt_linear",
]


def include(definitions: Iterable[Any]) -> None:
    """Show the references that recurrences' definitions bring with them (`name`, `reference`) under their names."""
    for definition in definitions:
        if definition.name not in __all__:
            globals()[definition.name] = definition.reference
            __all__.append(definition.name)
