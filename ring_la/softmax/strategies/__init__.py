"""How keys and values meet the queries of other ranks. One file a strategy."""

from .ahead import PostedKeys, post_keys
from .all_gather import KeyGather
from .canonical import CanonicalGather
from .chosen import KeysAsked
from .copied import Copied
from .heads import Heads, HeadSplit
from .job import AllHere, AttentionJob, Strategy
from .ring import KeyRing
from .sent import KeySend, SendPlan, share_sent

STRATEGIES: dict[str, Strategy] = {
    s.name: s for s in (AllHere(), KeyRing(), KeySend(), KeyGather(), Copied(), CanonicalGather(), KeysAsked())
}
"""Ways in which keys travel, by name; Ulysses exchanges heads for tokens around one of them."""


def ring_of(job: AttentionJob) -> Strategy:
    """How keys come from a group rank by rank: copied, else sent to those who need them, else from hand to hand."""
    if job.group is not None and job.group.copies:
        return STRATEGIES["copied"]
    return STRATEGIES["sent" if SendPlan.of(job).straight(job) else "ring"]


__all__ = [
    "STRATEGIES",
    "AttentionJob",
    "CanonicalGather",
    "Copied",
    "HeadSplit",
    "Heads",
    "KeyGather",
    "KeyRing",
    "KeySend",
    "KeysAsked",
    "PostedKeys",
    "Strategy",
    "SendPlan",
    "post_keys",
    "ring_of",
    "share_sent",
]
