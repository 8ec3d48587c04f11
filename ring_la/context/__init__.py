"""`ContextParallel`: the group a sequence is split over, how its ranks exchange states, and its layouts."""

from .agreed import CANONICAL_CHUNK
from .arguments import ATTENTION
from .grid_layout import GridLayout, UnevenLayout
from .halo import Arrived, Halo
from .parallel import ContextParallel
from .ranks import ContextRanks
from .sharded import FollowingLayout, ShardedLayout, check_together
from .weights import agree_on_weights

__all__ = [
    "ATTENTION",
    "Arrived",
    "CANONICAL_CHUNK",
    "ContextParallel",
    "ContextRanks",
    "FollowingLayout",
    "GridLayout",
    "Halo",
    "ShardedLayout",
    "UnevenLayout",
    "agree_on_weights",
    "check_together",
]
