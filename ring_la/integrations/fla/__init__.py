"""flash-linear-attention's context-parallel operators over ring_la, with its signatures.

    from ring_la.integrations.fla import chunk_gated_delta_rule, chunk_kda, causal_conv1d_cp

For engines that split a sequence by fla-core's ``build_cp_context(cu_seqlens, group)`` and hand its context on: the
same call, contiguous or zigzag, on GPUs and CPUs. fla-core is not imported. A context says where this rank's documents
begin; of the others' the ranks tell each other once a context, after which it carries ring_la's layout. Without a
context the operators work on one device, where states go in and out.
"""

from .context import layout_of
from .operators import HARMLESS, causal_conv1d_cp, chunk_gated_delta_rule, chunk_kda

__all__ = ["HARMLESS", "causal_conv1d_cp", "chunk_gated_delta_rule", "chunk_kda", "layout_of"]
