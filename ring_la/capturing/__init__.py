"""A user's whole step as one CUDA graph (`capture`), and the lengths that such steps are kept to (`Buckets`)."""

from .buckets import Buckets
from .step import CapturedStep, capture

__all__ = ["Buckets", "CapturedStep", "capture"]
