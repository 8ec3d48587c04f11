"""Device code of the linear recurrences. Nothing here communicates."""

from .choice import check_choice, make_local
from .operators import linear_recurrence, linear_recurrence_in_place, state_dtype
from .protocol import Inputs, Local
from .pytorch.chunks import Chunks

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
