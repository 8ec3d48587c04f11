"""Communication over torch.distributed: one group wrapper, its transports, one wait handle, token routing."""

from .agreement import refusal
from .calls import Entry
from .group import TRANSPORTS, Group
from .pending import Pending
from .replicated import Replicated, SumOverRanks
from .route import Route
from .transport import Transport

__all__ = ["TRANSPORTS", "Entry", "Group", "Pending", "Replicated", "Route", "SumOverRanks", "Transport", "refusal"]
