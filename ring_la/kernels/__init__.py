"""Device code of the linear recurrences. Nothing here communicates."""

from .backends import check_choice, make_local
from .chunking import Chunks
from .local import Inputs, Local
from .ops import linear_recurrence, linear_recurrence_in_place, state_dtype

__all__ = [
    "Chunks",
    "Inputs",
    "Local",
    "check_choice",
    "linear_recurrence",
    "linear_recurrence_in_place",
    "make_local",
    "state_dtype",
]
