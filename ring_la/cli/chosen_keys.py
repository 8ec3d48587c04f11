"""Attention to chosen latents in a plan: whether ranks gather these, as calls decide (`softmax/strategies/choice.py`),
and what that takes."""

from __future__ import annotations

from ..scan import CostModel
from ..softmax.strategies.choice import ChosenSizes
from ..softmax.strategies.schedule import owners_by_round
from .workload import BlockWork


def gathers(block: BlockWork, length: float, P: int, per_node: int) -> bool:
    """Whether P ranks gather the latents of a block, whose queries choose among them; over several hosts they do."""
    if not block.chosen or P == 1 or P > per_node:
        return bool(block.chosen)
    query = 2 * 2 * block.heads * (block.K + block.V) + 4 * block.chosen
    return ChosenSizes(length / P, block.chosen, query, length, block.kv, 2 * block.kv).gathers(P, _behind(P))


def rounds(block: BlockWork, length: float, P: int, per_node: int) -> int:
    """Blocks of latents that a rank's queries go to: one of all, or of a ring its own and those of others."""
    return 1 if gathers(block, length, P, per_node) else 1 + _behind(P)


def _behind(P: int) -> int:
    """Rounds behind the first of a copied ring in which every rank needs something of all."""
    return len(list(owners_by_round(0, [[(0, 1)]] * P, 1)))


def gathering(model: CostModel, block: BlockWork, length: float, P: int, backward: bool) -> float:
    """Seconds of gathering latents in each pass and of sending their gradients, in fp32, home: nothing is hidden."""
    others = block.kv * length * (P - 1) / P
    return model.gather(others) + (model.gather(others) + model.exchange(2 * others) if backward else 0.0)


def at_hand(block: BlockWork, length: float, P: int, per_node: int, backward: bool) -> float:
    """Bytes of gathered latents and, in fp32, of their gradients, of one layer at a time."""
    gathered = P > 1 and gathers(block, length, P, per_node)
    return (3 if backward else 1) * block.kv * length if gathered else 0.0
