"""Our own kernel: softcap, windows, documents, ALiBi, sinks and dropout at global positions, on any layout."""

from .backend import TritonBackend
from .chosen import TritonChosen
from .chosen_sorted import SortedChosen
from .in_blocks import CanonicalTriton

__all__ = ["CanonicalTriton", "SortedChosen", "TritonBackend", "TritonChosen"]
