"""How keys and values meet the queries of other ranks. One file a strategy."""

from .all_gather import AllGather
from .heads import Heads, HeadSplit
from .job import Job, Strategy
from .pulled import Pulled
from .ring import Ring

STRATEGIES: dict[str, Strategy] = {s.name: s for s in (Ring(), AllGather(), Pulled())}
"""Ways in which keys travel, by name; Ulysses exchanges heads for tokens around one of them."""

__all__ = ["STRATEGIES", "AllGather", "HeadSplit", "Heads", "Job", "Pulled", "Ring", "Strategy"]
