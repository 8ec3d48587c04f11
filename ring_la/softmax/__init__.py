"""Softmax attention on one device and on a split sequence.

    attention   the public functions; door: AttentionOptions as given → checks, agreement → an AttentionCall
    forgetting  attention with a decay, by further channels of q and k
    call        one call, on one device or split: placement, strategy and kernel → an AttentionMoves
    ahead       a call whose keys are sent before its queries are there
    head_groups  several of these, where Ulysses goes through the heads in groups
    results     o and lse that outlast a recomputation
    plan        forward and backward of one rank, as one autograd Function; operator: the same for torch.compile
    strategies/ one exchange of keys a file       backends/  one kernel a file
    wire        keys and values in FP8 while they travel
    geometry/   where rows stand, which pairs meet       merging/  partial results, put together

A strategy moves keys and values and knows no masks; a backend computes one block and knows no ranks; between them go
`Tokens`, which say where each row stands in the whole sequence.
"""

from .attention import attention, mla, sparse_attention
from .forgetting import forgetting_attention

__all__ = ["attention", "forgetting_attention", "mla", "sparse_attention"]
