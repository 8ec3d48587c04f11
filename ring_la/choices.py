"""What a caller chooses by a word, as types: editors offer the words, and type checkers find a misspelt one."""

from __future__ import annotations

from typing import Literal

LayoutKind = Literal["contiguous", "zigzag", "balanced", "striped"]
"""Who owns which tokens (`layout.Layout`)."""
ScanChoice = Literal["auto", "ring", "pipelined", "all_gather", "doubling", "all_to_all"]
"""How states travel between ranks (`scan.STRATEGIES`)."""
AttentionChoice = Literal["auto", "ring", "all_gather", "ulysses", "usp"]
"""How keys and values do (`softmax`)."""
ChosenChoice = Literal["auto", "ring", "all_gather", "ulysses", "usp", "chosen"]
"""The same where queries may choose their keys (`softmax.sparse_attention`)."""
HeadGroups = int | Literal["auto"]
"""In how many groups of heads Ulysses goes through them (`softmax`)."""
TransportChoice = Literal["auto", "torch", "symmetric"]
"""What carries messages (`comm`)."""
ValidateChoice = Literal["first", "always", "never"]
"""How often ranks compare their calls (`context.ContextParallel`)."""
Mode = Literal["auto", "chunk", "recurrent"]
"""In chunks or token by token (`kernels`)."""
RecurrenceBackend = Literal["triton", "torch", "reference"]
"""What computes a recurrence (`kernels`)."""
GroupedBackend = Literal["auto", "loop", "torch", "triton", "cutlass"]
"""What computes a grouped product (`grouped_gemm`)."""
SoftmaxBackend = Literal[
    "cudnn",
    "flash",
    "flash_attn_2",
    "flash_attn_3",
    "fa3_fwd",
    "fa3_fwd_fp8",
    "flash_attn_4",
    "sage",
    "triton",
    "cpu_flash",
    "torch",
    "reference",
]
"""What computes softmax attention (`softmax.backends`)."""
ChosenBackendName = Literal["triton", "triton_sorted", "triton_blocks", "torch", "reference"]
"""The same where queries choose their keys (`softmax.sparse_attention`)."""
Activation = Literal["silu"]
"""What follows a short convolution (`conv`)."""
JointPlace = Literal["front", "rear", "none"]
"""Where joint keys stand (`softmax.attention`)."""
LatentForm = Literal["expanded", "absorbed"]
"""How queries meet latents (`softmax.mla`)."""
