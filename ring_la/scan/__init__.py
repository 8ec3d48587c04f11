"""Exclusive scans of affine maps over the segments of a split sequence. One file a strategy."""

from .auto import STRATEGIES, CostModel
from .chain import Chain
from .horizon import Horizon
from .strategy import Cost, Exchange, Link, Scan

__all__ = ["STRATEGIES", "Chain", "Cost", "CostModel", "Exchange", "Horizon", "Link", "Scan"]
