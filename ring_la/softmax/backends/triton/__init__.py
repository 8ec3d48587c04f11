"""Our own kernel: softcap, windows, documents, ALiBi, sinks and dropout at global positions, on any layout."""

from .backend import TritonBackend
from .chosen import TritonChosen
from .chosen_blocks import BlockChosen
from .chosen_sorted import SortedChosen
from .in_blocks import CanonicalTriton

__all__ = ["BlockChosen", "CanonicalTriton", "SortedChosen", "TritonBackend", "TritonChosen"]
