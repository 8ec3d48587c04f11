"""How keys and values meet the queries of other ranks. One file a strategy."""

from .all_gather import AllGather
from .copied import Copied
from .heads import Heads, HeadSplit
from .job import Job, Strategy
from .ring import Ring

STRATEGIES: dict[str, Strategy] = {s.name: s for s in (Ring(), AllGather(), Copied())}
"""Ways in which keys travel, by name; Ulysses exchanges heads for tokens around one of them."""

__all__ = ["STRATEGIES", "AllGather", "Copied", "HeadSplit", "Heads", "Job", "Ring", "Strategy"]
