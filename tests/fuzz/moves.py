"""Tokens on their way between ranks, next-token labels, and the loss over a split sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ring_la.models.loss import linear_cross_entropy
from ring_la.running_sum import running_sum as sums

from .case import Case
from .problem import Here, Numbers, Problem, Tensors, state_dtype


def moves(case: Case) -> Problem:
    """shard, gather, convert and targets."""
    numbers = Numbers(case)
    x, ids = numbers.normal(case.B, case.T, case.V), numbers.below(50, case.B, case.T)
    ignore = case.how.get("ignore", -100)

    def truth(given: Tensors) -> Tensors:
        whole = given["x"]
        return {"gathered": whole, "converted": whole, "back": whole, "targets": _labels(case, ids, ignore)}

    def ours(given: Tensors, here: Here) -> Tensors:
        layout, other = here.layout, here.others["other"]
        moved = layout.convert(given["x"], other)
        labels = layout.targets(layout.shard(ids), ignore)
        return {"gathered": layout.gather(given["x"]), "converted": moved, "back": other.convert(moved, layout),
                "targets": labels.double()}  # fmt: skip

    exact = ("gathered", "converted", "back", "targets")
    return Problem(
        truth, ours, {"gathered": None, "converted": 1, "back": 1, "targets": 1}, {"x": x},
        layouts={"other": lambda cp: cp.layout(case.T, case.how["other"], case.cu)}, of={"converted": "other"},
        exact=exact,
        results={"targets": torch.float64},
    )  # fmt: skip


def running_sum(case: Case) -> Problem:
    """What positions, angles and forgetting attention's decays are: sums along each document, from a state or zero."""
    numbers = Numbers(case)
    tokens = {"x": numbers.normal(case.B, case.T, case.H, case.K)}
    before = {"start": numbers.normal(case.documents, case.H, case.K)} if case.how.get("initial") else {}
    cu = case.cu or (0, case.T)

    def truth(given: Tensors) -> Tensors:
        starts = given["start"] if "start" in given else torch.zeros(case.documents, 1, 1, dtype=torch.float64)
        parts = []
        for n, (a, b) in enumerate(zip(cu, cu[1:])):
            of = starts[n : n + 1] if case.cu is not None else starts
            parts.append(of[:, None] + given["x"][:, a:b].cumsum(1))
        return {"sums": torch.cat(parts, 1)}

    def ours(given: Tensors, here: Here) -> Tensors:
        return {"sums": sums(given["x"], here.layout, None, given.get("start"))}

    wide = case.dtype_of("states", state_dtype(case))
    return Problem(
        truth, ours, {"sums": 1}, tokens, replicated=before, dtypes=dict.fromkeys(before, wide),
        results={"sums": torch.float64},
    )  # fmt: skip


def loss(case: Case) -> Problem:
    """The cross-entropy of every rank's tokens; their sum is that of the sequence."""
    numbers, vocab = Numbers(case), case.how["vocab"]
    x, weight = numbers.normal(case.B, case.T, case.K), numbers.normal(vocab, case.K)
    ids = numbers.below(vocab, case.B, case.T)
    chunk = {"chunk": case.how["chunk"]} if "chunk" in case.how else {}

    def truth(given: Tensors) -> Tensors:
        logits = given["x"] @ given["weight"].T
        labels = _labels(case, ids, -100).long()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)}

    def ours(given: Tensors, here: Here) -> Tensors:
        labels = here.layout.targets(here.layout.shard(ids))
        return {"loss": linear_cross_entropy(given["x"].flatten(0, 1), given["weight"], labels.flatten(), **chunk)}

    wide = torch.promote_types(case.torch_dtype, torch.float32)
    return Problem(truth, ours, {"loss": "part"}, {"x": x}, {"weight": weight}, results={"loss": wide})


def _labels(case: Case, ids: torch.Tensor, ignore: int) -> torch.Tensor:
    """Each token's successor in its document."""
    labels = torch.full_like(ids, ignore)
    cu = case.cu or (0, case.T)
    for a, b in zip(cu, cu[1:]):
        if b > a:
            labels[:, a : b - 1] = ids[:, a + 1 : b]
    return labels.double()
