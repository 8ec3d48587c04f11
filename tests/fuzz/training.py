"""A step of a model of any layers, split and recomputed, against the same on one device."""

from __future__ import annotations

import torch
from torch import Tensor

import ring_la
from ring_la.models import HybridConfig, HybridLM
from ring_la.training.recompute import recompute

from .case import Case
from .problem import Numbers


def model(case: Case) -> HybridLM:
    """The same on every rank."""
    how, moe = case.how, case.how["mlp"] == "moe"
    small = dict(length=4, stride=2, block=4, topk=3, window=6)
    options = {"nsa": small, "dsa": dict(topk=5), "moba": dict(block=4, topk=2)}
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        mlp = dict(mlp="moe", mlp_dim=8, mlp_options=dict(experts=4, top_k=2, balance_coef=0.01)) if moe else {}
        given = {n: o for n, o in options.items() if n in how["layers"]}
        lm = HybridLM(HybridConfig(19, 16, how["layers"], 2, options=given, **mlp)).double()  # type: ignore[arg-type]
        with torch.no_grad():
            for p in lm.parameters():
                p += 0.05 * torch.randn(p.shape)
    return lm


def training(case: Case, cp: ring_la.ContextParallel) -> str:
    """What differs, in words; nothing: empty."""
    ids = Numbers(case).below(19, case.B, case.T)
    whole, split = model(case), model(case)
    cu = None if case.cu is None else torch.tensor(case.cu)
    want = whole.loss(ids, cu_seqlens=cu)
    want.backward()
    if case.how.get("recompute"):
        recompute(split, [case.how["recompute"]], keep_attention=bool(case.how.get("keep")))
    layout = cp.layout(case.T, case.kind, case.cu, case.multiple_of)
    if case.how.get("inference"):  # as an evaluation before training
        with torch.inference_mode():
            split.loss(layout.shard(ids), layout=layout)
    loss = split.loss(layout.shard(ids), layout=layout)
    loss.backward()
    pairs = {"loss": (cp.comm.all_reduce(loss.detach()).wait(), want.detach())}
    for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
        pairs[f"gradient of {name}"] = cp.comm.all_reduce(_gradient(p)).wait(), _gradient(q)
    off = {n: float((a - b).norm() / max(float(b.norm()), 1e-4 * b.numel() ** 0.5)) for n, (a, b) in pairs.items()}
    return "; ".join(f"{n} is off by {e:.1e}" for n, e in off.items() if not e < 1e-7)


def _gradient(p: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad
