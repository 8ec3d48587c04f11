"""The one path of all linear recurrences, on one device and on a split sequence, with exact gradients."""

from .options import CommonOptions
from .path import run
from .seams import Seams

__all__ = ["CommonOptions", "Seams", "run"]
