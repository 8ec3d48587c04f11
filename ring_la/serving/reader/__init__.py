"""Prompts read for another engine: `Reader` is the ranks, `Desk` the prompts under way, `Door` the HTTP on rank 0.

What reads on from there is on the other side of `ring_la.integrations.vllm`.
"""

from .desk import Asked, Desk, Failed
from .door import Door, listen
from .reading import Reader

__all__ = ["Asked", "Desk", "Door", "Failed", "Reader", "listen"]
