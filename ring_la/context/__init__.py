"""`ContextParallel`: the group a sequence is split over, how its ranks exchange states, and its layouts."""

from .arguments import ATTENTION
from .grid_layout import GridLayout, UnevenLayout
from .halo import Halo
from .parallel import ContextParallel
from .sharded import CANONICAL_CHUNK, ShardedLayout

__all__ = ["ATTENTION", "CANONICAL_CHUNK", "ContextParallel", "GridLayout", "Halo", "ShardedLayout", "UnevenLayout"]
