"""`ContextParallel`: the group a sequence is split over, how its ranks exchange states, and its layouts."""

from .arguments import ATTENTION
from .parallel import CANONICAL_CHUNK, ContextParallel, ShardedLayout

__all__ = ["ATTENTION", "CANONICAL_CHUNK", "ContextParallel", "ShardedLayout"]
