"""Exclusive scans of affine maps over the segments of a split sequence. One file a strategy."""

from .auto import STRATEGIES, CostModel
from .border import MailboxBorder
from .chain import Chain
from .horizon import Horizon
from .mailbox_ring import carries
from .ring import CANONICAL
from .strategy import Cost, Exchange, Link, Scan

__all__ = [
    "CANONICAL", "STRATEGIES", "Chain", "Cost", "CostModel", "Exchange", "Horizon", "Link", "MailboxBorder", "Scan",
    "carries",
]  # fmt: skip
