"""Communication over torch.distributed: one group wrapper, its transports, one wait handle, token routing."""

from .agreement import refusal
from .calls import Entry
from .group import TRANSPORTS, Group
from .pending import Pending
from .profiled import EXCHANGES, is_exchange
from .replicated import Replicated, SumOverRanks
from .route import Route

__all__ = [
    "EXCHANGES",
    "TRANSPORTS",
    "Entry",
    "Group",
    "Pending",
    "Replicated",
    "Route",
    "SumOverRanks",
    "is_exchange",
    "refusal",
]
