"""Communication over torch.distributed: one group wrapper, one wait handle, token routing."""

from .group import Group, Pending
from .replicated import Replicated, SumOverRanks
from .route import Route

__all__ = ["Group", "Pending", "Replicated", "Route", "SumOverRanks"]
