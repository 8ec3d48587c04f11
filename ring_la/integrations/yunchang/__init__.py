"""yunchang's entry points over ring_la: its autograd Functions, functions and layers, with its signatures.

The Functions are real ``torch.autograd.Function`` classes under yunchang's contract, so that code written against it
can subclass them or mix forward and backward:

    saved tensors   (q, k, v, out, softmax_lse), varlen (…, cu_seqlens), zigzag varlen of several documents (…, half
                    indices)
    on ctx          every attribute that a released yunchang or xDiT backward reads, used by this forward or not

Tensors are ``[B, T, H, D]`` of this rank, equally long on all ranks of `group`; varlen tensors ``[T, H, D]`` with local
`cu_seqlens`, each document split over all ranks. `softmax_lse` is fp32 ``[B, H, T]``. Where yunchang does not do
what its arguments say, these do what they say: windows count from global positions, dropout's backward repeats the
forward's mask, gradients come in the inputs' dtype, and softcap, ALiBi, GQA and fp32 work in every split.

`attn_type` picks a kernel as far as it names one of ours: torch_math, torch_flash, torch_cudnn; fa and torch_efficient
take the fastest. `attn_processor` is kept on ctx, as upstream does; only its sparse Sage kernel uses it: refused.
"""

from .entries import (
    RING_IMPL_DICT,
    RING_IMPL_QKVPACKED_DICT,
    install,
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    ring_pytorch_attn_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)
from .functions import (
    RingFlashAttnFunc,
    RingFlashAttnVarlenFunc,
    StripeFlashAttnFunc,
    ZigZagRingFlashAttnFunc,
    ZigZagRingFlashAttnVarlenFunc,
)
from .layers import (
    EXTRACT_FUNC_DICT,
    PROCESS_GROUP,
    AsyncLongContextAttention,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    basic_extract_local,
    set_seq_parallel_pg,
    stripe_extract_local,
    zigzag_extract_local,
)

__all__ = [
    "AsyncLongContextAttention",
    "EXTRACT_FUNC_DICT",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "PROCESS_GROUP",
    "RING_IMPL_DICT",
    "RING_IMPL_QKVPACKED_DICT",
    "RingFlashAttnFunc",
    "RingFlashAttnVarlenFunc",
    "StripeFlashAttnFunc",
    "UlyssesAttention",
    "ZigZagRingFlashAttnFunc",
    "ZigZagRingFlashAttnVarlenFunc",
    "basic_extract_local",
    "install",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "ring_pytorch_attn_func",
    "set_seq_parallel_pg",
    "stripe_extract_local",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "zigzag_extract_local",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
