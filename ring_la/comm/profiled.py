"""What a profile of a step shows of exchanges, by name."""

from __future__ import annotations

import re

EXCHANGES = r"nccl|gloo:|c10d|exchange_kernel|link_kernel|^(arrived|meet)$|memcpy.*(ptop|peer)"
"""Names of exchanges, in lower case: NCCL's kernels, gloo's messages, torch.distributed's operators, and of mailboxes
their messages, links between ranks, waits, and copies between GPUs."""


def is_exchange(name: str) -> bool:
    """Whether a kernel, a copy or an operator of a profile moves data between ranks, or waits for them."""
    return re.search(EXCHANGES, name.lower()) is not None
