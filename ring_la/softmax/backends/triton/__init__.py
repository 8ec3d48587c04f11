"""Our own kernel: softcap, windows, documents, ALiBi, sinks and dropout at global positions, on any layout."""

from .chosen import TritonChosen
from .chosen_sorted import SortedChosen
from .launch import TritonBackend
from .span_launch import TritonSpans

__all__ = ["SortedChosen", "TritonBackend", "TritonChosen", "TritonSpans"]
