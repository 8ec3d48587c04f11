"""Prompts read for another engine: `Reader` is the ranks, `Desk` the prompts under way, `Door` the HTTP on rank 0.

What reads on from there is on the other side of `ring_la.integrations.vllm`.
"""

from .desk import AskedPrompt, Desk, Unread
from .door import Door, listen
from .reading import Reader

__all__ = ["AskedPrompt", "Desk", "Door", "Unread", "Reader", "listen"]
