"""How keys and values meet the queries of other ranks. One file a strategy."""

from .job import Job
from .ring import Ring

__all__ = ["Job", "Ring"]
