"""Our own kernel: softcap, windows, documents, ALiBi, sinks and dropout at global positions, on any layout."""

from .launch import TritonBackend

__all__ = ["TritonBackend"]
