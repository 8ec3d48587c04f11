"""What a recurrence of one's own is written with: `recurrence`, the decorator that makes one, and the words it takes.

A recurrence defined so is a function like `ring_la.gla`: on one device and split by a layout, packed, with states and
exact gradients. `ring_la.testing.check_recurrence` holds it to its reference.
"""

from .algebra import Rule
from .kernels import Inputs
from .linear import CommonOptions
from .recurrences.arguments import CHANNEL_DECAY, DECAY, KEY, QUERY, RATE, VALUE, Argument
from .recurrences.definition import Definition, Recurrence
from .recurrences.recurrence import recurrence
from .reference.by_token import outer, read

__all__ = [
    "CHANNEL_DECAY",
    "DECAY",
    "KEY",
    "QUERY",
    "RATE",
    "VALUE",
    "Argument",
    "CommonOptions",
    "Definition",
    "Inputs",
    "Recurrence",
    "Rule",
    "outer",
    "read",
    "recurrence",
]
