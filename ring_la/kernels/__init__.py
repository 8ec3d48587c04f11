"""Device code of the linear recurrences. Nothing here imports `ring_la.comm` or torch.distributed; launches that
exchange states by mailboxes are handed where these lie."""

from .choice import CanonicalChunks, check_choice, make_local
from .known import KnownCall
from .operators import ForwardOthers, InPlaceOthers, linear_recurrence, linear_recurrence_in_place, state_dtype
from .protocol import Adjoint, Backward, Inputs, Local, Output, OutputUse, SpanMaps, Summary
from .pytorch.chunks import Chunks

__all__ = [
    "Adjoint",
    "Backward",
    "CanonicalChunks",
    "Chunks",
    "ForwardOthers",
    "InPlaceOthers",
    "Inputs",
    "KnownCall",
    "Local",
    "SpanMaps",
    "Summary",
    "Output",
    "OutputUse",
    "check_choice",
    "linear_recurrence",
    "linear_recurrence_in_place",
    "make_local",
    "state_dtype",
]
