"""Exclusive scans of affine maps over the segments of a split sequence. One file a strategy."""

from .all_gather import AllGather
from .all_to_all import AllToAll
from .auto import PIPELINE_BLOCKS, CostModel
from .chain import Chain
from .doubling import Doubling
from .ring import Ring
from .strategy import Link, Scan

STRATEGIES: dict[str, Scan] = {
    s.name: s for s in (Ring("ring"), Ring("pipelined", PIPELINE_BLOCKS), AllGather(), Doubling(), AllToAll())
}
"""Every scan strategy by name; tests and ``scan="auto"`` go through this table."""

__all__ = ["STRATEGIES", "Chain", "CostModel", "Link", "Scan"]
