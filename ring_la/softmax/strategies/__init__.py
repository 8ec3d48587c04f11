"""How keys and values meet the queries of other ranks. One file a strategy."""

from .all_gather import KeyGather
from .canonical import CanonicalGather
from .chosen import KeysAsked
from .copied import Copied
from .heads import Heads, HeadSplit
from .job import AttentionJob, Strategy
from .ring import KeyRing

STRATEGIES: dict[str, Strategy] = {
    s.name: s for s in (KeyRing(), KeyGather(), Copied(), CanonicalGather(), KeysAsked())
}
"""Ways in which keys travel, by name; Ulysses exchanges heads for tokens around one of them."""

__all__ = [
    "STRATEGIES",
    "AttentionJob",
    "CanonicalGather",
    "Copied",
    "HeadSplit",
    "Heads",
    "KeyGather",
    "KeyRing",
    "KeysAsked",
    "Strategy",
]
