"""Our own kernel: softcap, windows, documents, ALiBi, sinks and dropout at global positions, on any layout."""

from .chosen import TritonChosen
from .launch import TritonBackend, TritonInPlace

__all__ = ["TritonBackend", "TritonChosen", "TritonInPlace"]
