"""Softmax attention in its four forms, and the choices that its queries make."""

from __future__ import annotations

import torch
from torch import Tensor

import ring_la
from ring_la import indexers, reference
from tests.support.attention_cases import finite

from .case import Case
from .problem import Here, Numbers, Options, Problem, Tensors, state_dtype


def _options(case: Case) -> Options:
    how = case.how
    window = (how["window"][0], -1 if how["causal"] else how["window"][1])
    return {"causal": how["causal"], "window": window, "scale": how.get("scale")}


def _problem(case: Case, truth, ours, tokens: Tensors, shared: Tensors, keys: tuple[str, ...] = ()) -> Problem:
    """A problem of attention; o, and lse where a gradient comes from it."""
    other = "keys" in case.how
    where = {"o": 1, "lse": 2} if case.how.get("dlse") else {"o": 1}
    return Problem(
        lambda x: _shown(truth(x), where), lambda x, here: _shown(ours(x, here), where), where, tokens, shared,
        layouts={"keys": lambda cp: cp.layout(*case.how["keys"], case.cu)} if other else {},
        of=dict.fromkeys(keys, "keys") if other else {},
        dtypes={"sinks": case.dtype_of("gates", case.torch_dtype)} if "sinks" in shared else {},
        results={"lse": state_dtype(case)},
    )  # fmt: skip


def _shown(out, where: dict) -> Tensors:
    return {"o": out.o} | ({"lse": finite(out.lse)} if "lse" in where else {})


def _places(case: Case, here: Here) -> Options:
    keys = {"kv_layout": here.others["keys"]} if here.others else {}
    return keys | {"layout": here.layout, "strategy": None if case.attention == "auto" else case.attention}


def attention(case: Case) -> Problem:
    numbers, how = Numbers(case), case.how
    Tk = how["keys"][0] if "keys" in how else case.T
    tokens = {"q": numbers.normal(case.B, case.T, case.H, case.K)}
    tokens |= {"k": numbers.normal(case.B, Tk, case.Hk, case.K), "v": numbers.normal(case.B, Tk, case.Hk, case.V)}
    shared = {"sinks": numbers.normal(case.H)} if how.get("sinks") else {}
    options = _options(case) | {"softcap": how.get("softcap", 0.0)}
    if "joint" in how:
        options["joint"] = how["joint"]
        shared |= {f"joint_{n}": numbers.normal(case.B, 3, *tokens[n].shape[2:]) for n in "kv"}
    if "alibi" in how:
        slopes = numbers.uniform(*((case.B, case.H) if how["alibi"] == "rows" else (case.H,))) * 0.3
        options["alibi_slopes"] = slopes.float()
    if "dropout" in how:
        options |= {"dropout_p": how["dropout"], "dropout_seed": case.seed}

    def truth(x: Tensors):
        cu = None if case.cu is None else torch.tensor(case.cu)
        whole = ring_la.attention if "dropout" in how else reference.attention  # whose mask is ring_la's own
        return whole(**x, **options, cu_seqlens=cu)

    def ours(x: Tensors, here: Here):
        return ring_la.attention(**x, **options, **_places(case, here))

    return _problem(case, truth, ours, tokens, shared, ("k", "v"))


def forgetting(case: Case) -> Problem:
    numbers, how = Numbers(case), case.how
    tokens = {n: numbers.normal(case.B, case.T, h, d) for n, h, d in
              (("q", case.H, case.K), ("k", case.Hk, case.K), ("v", case.Hk, case.V))}  # fmt: skip
    strength = torch.logspace(-3, 0.5, case.H, dtype=torch.float64)
    tokens["g"] = -strength * numbers.uniform(case.B, case.T, case.H)
    if how.get("hard"):
        tokens["g"] = torch.where(numbers.normal(*tokens["g"].shape) > 1.2, -40.0, tokens["g"])
    options = {"scale": how.get("scale"), "window": how.get("left", -1)}

    def truth(x: Tensors):
        return reference.forgetting_attention(**x, **options, cu_seqlens=case.cu)

    def ours(x: Tensors, here: Here):
        return ring_la.forgetting_attention(**x, **options, layout=here.layout)

    problem = _problem(case, truth, ours, tokens, {})
    problem.dtypes["g"] = case.dtype_of("gates", state_dtype(case))
    return problem


def log_linear(case: Case) -> Problem:
    numbers, how = Numbers(case), case.how
    cu = case.cu or (0, case.T)
    seen = None
    if how.get("initial"):
        seen = tuple(numbers.below(12, len(cu) - 1).tolist())
    longest = max(b - a + n for a, b, n in zip(cu, cu[1:], seen or (0,) * len(cu)))
    levels = max(longest - 1, 0).bit_length() + 1 + how.get("levels", 0)
    tokens = {n: numbers.normal(case.B, case.T, h, d) for n, h, d in
              (("q", case.Hk, case.K), ("k", case.Hk, case.K), ("v", case.H, case.V))}  # fmt: skip
    tokens["g"] = -torch.logspace(-3, 0.5, case.H, dtype=torch.float64) * numbers.uniform(case.B, case.T, case.H)
    if how.get("hard"):
        tokens["g"] = torch.where(numbers.normal(*tokens["g"].shape) > 1.2, -40.0, tokens["g"])
    tokens["lam"] = numbers.normal(case.B, case.T, case.H, levels)
    options: Options = {"scale": how.get("scale"), "output_final_state": how.get("final", False)}
    before: Tensors = {}
    if seen is not None:  # levels are there where `seen` has a bit
        drawn, bits = numbers.normal(case.documents, case.H, levels, case.K, case.V), torch.tensor(seen)
        there = (bits[:, None] >> torch.arange(levels)) % 2 == 1
        before = {"initial_state": drawn * there[:, None, :, None, None]}
        options["first"] = seen if case.cu is not None else seen[0]

    def named(out) -> Tensors:
        return {"o": out.o} | ({"final": out.final_state} if how.get("final") else {})

    def truth(x: Tensors) -> Tensors:
        return named(reference.log_linear_attention(**x, **options, cu_seqlens=case.cu))

    def ours(x: Tensors, here: Here) -> Tensors:
        return named(ring_la.log_linear_attention(**x, **options, layout=here.layout))

    wide = state_dtype(case)
    return Problem(
        truth, ours, {"o": 1} | ({"final": None} if how.get("final") else {}), tokens, replicated=before,
        dtypes={n: case.dtype_of("gates", wide) for n in ("g", "lam")}
        | dict.fromkeys(before, case.dtype_of("states", wide)),
        results={"final": wide},
    )  # fmt: skip


def mla(case: Case) -> Problem:
    numbers, how = Numbers(case), case.how
    Tk, L, R = how["keys"][0] if "keys" in how else case.T, how["latent"], how["rotary"]
    tokens = {"q": numbers.normal(case.B, case.T, case.H, case.K + R), "latent": numbers.normal(case.B, Tk, L)}
    tokens["k_rope"] = numbers.normal(case.B, Tk, R)
    shared = {"w_uk": numbers.normal(case.H, case.K, L) / L**0.5, "w_uv": numbers.normal(case.H, case.V, L) / L**0.5}
    if how.get("sinks"):
        shared["sinks"] = numbers.normal(case.H)
    options = _options(case) | {"softcap": how.get("softcap", 0.0)}
    places = _draw_choice(case, numbers, 1) if "choices" in how else None
    chosen = {} if places is None else {"block": how["block"]}

    def truth(x: Tensors):
        return reference.mla(**x, **options, **chosen, chosen=places, cu_seqlens=case.cu)

    def ours(x: Tensors, here: Here):
        own = {} if places is None else chosen | {"chosen": here.layout.shard(places)}
        return ring_la.mla(**x, **options, **own, form=how.get("form"), **_places(case, here))

    return _problem(case, truth, ours, tokens, shared, ("latent", "k_rope"))


def sparse(case: Case) -> Problem:
    numbers, how = Numbers(case), case.how
    tokens = {n: numbers.normal(case.B, case.T, h, d) for n, h, d in
              (("q", case.H, case.K), ("k", case.Hk, case.K), ("v", case.Hk, case.V))}  # fmt: skip
    shared = {"sinks": numbers.normal(case.H)} if how.get("sinks") else {}
    options = _options(case) | {"block": how["block"]}
    places = _draw_choice(case, numbers, case.Hk)

    def truth(x: Tensors):
        return reference.sparse_attention(**x, **options, chosen=places, cu_seqlens=case.cu)

    def ours(x: Tensors, here: Here):
        return ring_la.sparse_attention(**x, **options, chosen=here.layout.shard(places), **_places(case, here))

    return _problem(case, truth, ours, tokens, shared)


def _draw_choice(case: Case, numbers: Numbers, heads: int) -> Tensor:
    """Places ``[B, T, heads, S]`` of blocks that do not overlap; some are nothing."""
    starts = torch.arange(0, case.T, case.how["block"])
    S = min(case.how["choices"], len(starts))
    chosen = starts[numbers.uniform(case.B, case.T, heads, len(starts)).topk(S, -1).indices]
    return torch.where(numbers.uniform(*chosen.shape) < 0.15, -1, chosen).int()


def chosen(case: Case) -> Problem:
    """What split queries choose is what they choose on one device (which the tests of indexers hold to loops)."""
    numbers, how = Numbers(case), case.how
    tokens = {"q": numbers.normal(case.B, case.T, case.H, case.K)}
    if how["index"] == "lightning":
        tokens |= {"k": numbers.normal(case.B, case.T, case.K), "w": numbers.normal(case.B, case.T, case.H)}
    else:
        one = how["index"] in ("best_key", "full_block")  # of all heads
        tokens["k"] = numbers.normal(case.B, case.T, *(() if one else (case.Hk,)), case.K)

    def call(x: Tensors, **where) -> Tensors:
        x = {n: t.detach() for n, t in x.items()}
        if how["index"] == "lightning":
            out = indexers.lightning_index(*x.values(), how["topk"], **where)
        else:
            function = getattr(indexers, f"{how['index']}_index")
            out = function(x["q"], x["k"], how["size"], how["topk"], **where)
        return {"places": out.places.double()}

    cu = None if case.cu is None else torch.tensor(case.cu)
    return Problem(
        lambda x: call(x, cu_seqlens=cu), lambda x, here: call(x, layout=here.layout), {"places": 1}, tokens,
        gradients=False, exact=("places",),
    )  # fmt: skip
