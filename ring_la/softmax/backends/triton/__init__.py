"""Our own kernel: softcap, windows, documents, ALiBi, sinks and dropout at global positions, on any layout."""

from .chosen import TritonChosen
from .chosen_sorted import SortedChosen
from .in_blocks import CanonicalTriton
from .launch import TritonBackend

__all__ = ["CanonicalTriton", "SortedChosen", "TritonBackend", "TritonChosen"]
