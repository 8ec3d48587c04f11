"""Cases by a seed: every operation, documents with borders anywhere, every layout, strategy and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ring_la.recurrences import RECURRENCES
from ring_la.scan import STRATEGIES

from .case import Case
from .strides import EXPANDED, WAYS

RUNS = ("contiguous", "zigzag", "balanced")
ANY = (*RUNS, "striped")
WEIGHTS = {r.name: 3.0 for r in RECURRENCES} | {
    "attention": 14, "forgetting_attention": 4, "mla": 6, "sparse_attention": 5, "short_conv": 5, "token_shift": 3,
    "bidirectional": 4, "scan": 5, "moves": 5, "grid": 5,
    "loss": 3, "running_sum": 2, "grouped_gemm": 3, "decoding": 10,
    "chosen": 3, "model": 1.5, "resume": 0.15, "log_linear_attention": 3, "training": 3, "bits": 6,
}  # fmt: skip
"""How often an operation is drawn."""
MAMBA3 = 6
"""Its width of keys: twice the angles of its examples."""
RESUMING = ("context", "data2", "fsdp2", "fsdp")
LONG = ("model", "resume", "training", "bits")
"""They take longer than others."""
SHORT = 24
"""Tokens of the longest case whose messages fit into mailboxes of files."""
SCALES = (None, None, None, 0.3, 1.0, -0.4, 0.0)
OTHERS = (None, None, None, None, "fp64", "fp32", "bf16")
"""Dtypes of single inputs; None: as they come."""


def draw(rng: Random, small: bool = False) -> Case:
    """Any case; `small`: of at most 24 tokens, and without what takes seconds (models, measuring the group)."""
    weights = {op: w for op, w in WEIGHTS.items() if not small or op not in LONG}
    op = rng.choices(list(weights), list(weights.values()))[0]
    T, cu, B = _tokens(rng, small)
    case = Case(
        op, P=rng.choice((1, 2, 2, 3, 3, 4, 4)), kind=rng.choice(RUNS), T=T, cu=cu, B=B, Hk=rng.choice((1, 1, 2, 3)),
        groups=rng.choice((1, 1, 2)), K=rng.choice((1, 2, 3, 4, 6, 8)), V=rng.choice((1, 2, 3, 5, 8)),
        dtype=rng.choices(("fp64", "fp32", "bf16"), (5, 3, 2))[0],
        scan=rng.choice((*STRATEGIES, *(() if small else ("auto",)))),
        attention=rng.choice(("auto", "ring", "all_gather", "ulysses")),
        multiple_of=rng.choice((None, None, None, 2, 5)), seed=rng.randrange(1 << 30),
        validate=rng.choices(("first", "always", "never"), (8, 1, 1))[0],
    )  # fmt: skip
    case = _around(rng, _MORE.get(op, _recurrence)(rng, case))
    by_files = case.P > 1 and case.T <= SHORT and case.op != "resume" and rng.random() < 0.08
    return case.but(transport="symmetric") if by_files else case


def _around(rng: Random, case: Case) -> Case:
    """Where a call's tensors lie, which want gradients, and what is on while it runs."""
    how = {"strides": rng.choice((*WAYS, *EXPANDED, "mixed", "mixed")) if rng.random() < 0.4 else None,
           "some": rng.random() < 0.15 or None, "inference": rng.random() < 0.12 or None,
           "autocast": (rng.random() < 0.25 and case.dtype == "fp32" and case.op != "grid") or None}  # fmt: skip
    if case.kind == "balanced":
        how["seen"] = rng.choice((None, None, 0, 3, 20))
    if case.op in ("model", "training", "resume"):  # they make their own tensors and layouts
        return case
    if case.op in ("bits", "decoding"):
        how = {"strides": how["strides"]}
    return case.but(how=how)


def _tokens(rng: Random, small: bool) -> tuple[int, tuple[int, ...] | None, int]:
    """Tokens, documents, rows."""
    T = rng.choices(
        (rng.randint(1, 24), rng.randint(25, 70), rng.randint(71, 150)), (75, 20, 5) if not small else (1, 0, 0)
    )[0]
    if rng.random() < 0.5:
        return T, None, rng.choice((1, 2)) if T < 71 else 1
    borders = sorted(rng.randint(0, T) for _ in range(rng.randint(0, 6)))
    return T, (0, *borders, T), 1


def _states(rng: Random) -> dict:
    initial = rng.random() < 0.5 or None
    return {"initial": initial, "final": rng.random() < 0.5 or None, "states": rng.choice(OTHERS) if initial else None}


def _same_bits(rng: Random, case: Case) -> Case:
    """Some in deterministic mode, whose borders are its own."""
    return case.but(deterministic=True, multiple_of=None, scan="ring") if rng.random() < 0.1 else case


def _recurrence(rng: Random, case: Case) -> Case:
    how = _states(rng) | {
        "hard": rng.random() < 0.3 or None, "scale": rng.choice(SCALES), "gates": rng.choice(OTHERS),
        "l2norm": rng.random() < 0.3 or None, "mode": rng.choice((None, None, "chunk", "recurrent")),
        "own": rng.random() < 0.5 or None,
    }  # fmt: skip
    K = MAMBA3 if case.op in ("mamba3", "mamba3_mimo") else case.K
    if case.op == "ttt_linear":  # a norm of two numbers is their order, and its gradients are rounding
        K = max(K, 6)
    if K == 1 and case.dtype != "fp64":  # unit vectors of one channel have no gradient, and what is left is rounding
        how["l2norm"] = None
    case = _same_bits(rng, case.but(how=how, K=K))
    return case.but(how={"mode": None}) if case.deterministic else case


def _attention(rng: Random, case: Case) -> Case:
    causal, joint = rng.random() < 0.6, rng.choice((None, None, None, "front", "rear"))
    joint = None if causal and joint == "rear" else joint
    how = {
        "causal": causal, "window": [rng.choice((-1, -1, 0, 3, 20)), rng.choice((-1, -1, 0, 2, 9))],
        "softcap": rng.choice((None, None, 2.0)), "sinks": rng.random() < 0.3 or None,
        "alibi": rng.choice((None, None, None, "heads", "rows")), "joint": joint,
        "scale": rng.choice(SCALES), "dlse": rng.random() < 0.3 or None,
        "dropout": rng.choice((None, None, None, 0.3)),
    }  # fmt: skip
    if case.cu is None and rng.random() < 0.25:
        how["keys"] = [rng.randint(1, 60), rng.choice(ANY)]
    how["gates"] = rng.choice(OTHERS) if how["sinks"] else None
    case = _same_bits(rng, case.but(kind=rng.choice(ANY), how=how))
    return case.but(kind=rng.choice(RUNS), how=PLAIN) if case.deterministic else case


PLAIN = {"keys": None, "joint": None, "dropout": None, "mode": None, "choices": None, "form": None, "alibi": None}
"""What deterministic mode refuses, turned off."""


def _mla(rng: Random, case: Case) -> Case:
    case = _attention(rng, case)
    form = None if case.deterministic else rng.choice((None, "expanded", "absorbed"))
    how = {"alibi": None, "joint": None, "dropout": None, "form": form}
    if rng.random() < 0.3 and not case.deterministic:
        how |= _choice(rng, case, "latent") | {"softcap": None, "form": None}
        case = case.but(attention=rng.choice(("auto", "ring", "all_gather")))
    return case.but(how=how | {"rotary": rng.choice((0, 2, 4)), "latent": rng.choice((3, 8))})


def _sparse(rng: Random, case: Case) -> Case:
    case = _attention(rng, case).but(deterministic=False)
    off = {n: None for n in ("alibi", "joint", "dropout", "softcap")}
    return case.but(how=off | _choice(rng, case, "heads"), attention=rng.choice(("auto", "ring", "all_gather")))


def _choice(rng: Random, case: Case, heads: str) -> dict:
    return {"block": rng.choice((1, 1, 2, 5)), "choices": rng.randint(1, 8), "per_head": heads == "heads" or None,
            "keys": None}  # fmt: skip


def _forgetting(rng: Random, case: Case) -> Case:
    how = {"scale": rng.choice(SCALES), "left": rng.choice((None, 0, 4, 20)), "hard": rng.random() < 0.2 or None,
           "gates": rng.choice(OTHERS), "dlse": rng.random() < 0.3 or None}  # fmt: skip
    return _same_bits(rng, case.but(how=how))


def _conv(rng: Random, case: Case) -> Case:
    how = _states(rng) | {"W": rng.randint(1, 5), "bias": rng.random() < 0.5 or None,
                          "silu": rng.random() < 0.5 or None, "heads": rng.random() < 0.3 or None,
                          "gates": rng.choice(OTHERS)}  # fmt: skip
    return _same_bits(rng, case.but(how=how))


def _running(rng: Random, case: Case) -> Case:
    return _same_bits(rng, case.but(how=_states(rng) | {"final": None}))


def _bidirectional(rng: Random, case: Case) -> Case:
    return case.but(how=_states(rng) | {"normalize": rng.random() < 0.4 or None, "scale": rng.choice(SCALES)})


def _scan(rng: Random, case: Case) -> Case:
    how = {"A": rng.choice((None, "scalar", "diagonal", "dense")), "reverse": rng.random() < 0.5 or None}
    return case.but(how=how | {"exclusive": rng.random() < 0.5 or None}, K=min(case.K, 4), T=case.T)


def _moves(rng: Random, case: Case) -> Case:
    return case.but(kind=rng.choice(ANY), how={"other": rng.choice(ANY), "ignore": rng.choice((None, -1))})


def _grid(rng: Random, case: Case) -> Case:
    """Slices stand for tokens; counts of them a rank, widths beyond a neighbour's slices."""
    T = min(case.T, 24)
    borders = sorted(rng.randint(0, T) for _ in range(case.P - 1))
    counts = [b - a for a, b in zip((0, *borders), (*borders, T))] if rng.random() < 0.5 else None
    how = {"columns": rng.choice((1, 2, 3)), "width": [rng.choice((0, 1, 1, 2, 5)) for _ in range(2)], "counts": counts}
    return case.but(T=T, cu=None, kind="contiguous", multiple_of=None, how=how)


def _loss(rng: Random, case: Case) -> Case:
    return case.but(kind=rng.choice(ANY), how={"chunk": rng.choice((None, 1, 7)), "vocab": rng.choice((2, 11, 50))})


def _grouped(rng: Random, case: Case) -> Case:
    return case.but(P=1, how={"sizes": [rng.choice((0, 1, 3, rng.randint(0, 40))) for _ in range(rng.randint(1, 5))]})


def _decoding(rng: Random, case: Case) -> Case:
    T = min(case.T, 40)
    names = [r.name for r in RECURRENCES if r.name != "ttt_linear"] + ["short_conv", "token_shift"]  # by mini-batches
    cuts = sorted({rng.randint(0, T) for _ in range(rng.randint(1, 3))} - {0, T})
    parts = [rng.choice(("contiguous", "zigzag", "whole", "steps")) for _ in range(len(cuts) + 1)]
    how = {"of": rng.choice(names), "cuts": cuts, "parts": parts, "hard": rng.random() < 0.2 or None,
           "in_place": rng.random() < 0.3 or None, "W": rng.randint(1, 4)}  # fmt: skip
    if how["of"] in ("mamba3", "mamba3_mimo"):
        case = case.but(K=MAMBA3)
    return case.but(T=T, cu=None, how={k: v for k, v in how.items() if v is not None})


def _chosen(rng: Random, case: Case) -> Case:
    how = {"index": rng.choice(("lightning", "block", "full_block", "best_key")), "topk": rng.randint(1, 6),
           "size": rng.choice((1, 2, 4))}  # fmt: skip
    return case.but(dtype="fp64", kind=rng.choice(ANY), how=how)


def _model(rng: Random, case: Case) -> Case:
    from ring_la.nn import LAYERS

    T = min(case.T, 30)
    whole = {"nsa", "dsa", "moba"}  # they do not go on from a cache on split tokens; for ttt see `draw`
    more = sorted(set(LAYERS) - whole - {"ttt"})
    layers = [rng.choice(more) for _ in range(2)]
    cuts = sorted({rng.randint(0, T) for _ in range(2)} - {0, T})
    parts = [rng.choice(("contiguous", "zigzag", "whole", "steps")) for _ in range(len(cuts) + 1)]
    return case.but(T=T, cu=None, dtype="fp64", how={"layers": layers, "cuts": cuts, "parts": parts})


def _resume(rng: Random, case: Case) -> Case:
    how = {"first": rng.choice(RESUMING), "second": rng.choice(RESUMING), "background": rng.random() < 0.5 or None}
    layers = [rng.choice(("gdn", "attention", "mamba2", "rwkv7")) for _ in range(2)]
    return case.but(P=4, T=rng.randint(8, 24), cu=None, B=1, dtype="fp64", how=how | {"layers": layers})


def _log_linear(rng: Random, case: Case) -> Case:
    how = {"hard": rng.random() < 0.2 or None, "scale": rng.choice(SCALES), "levels": rng.choice((0, 0, 1, 3)),
           "gates": rng.choice(OTHERS)}  # fmt: skip
    return case.but(kind=rng.choice(RUNS), how=how | _states(rng))


def _training(rng: Random, case: Case) -> Case:
    from ring_la.nn import LAYERS

    layers = [rng.choice(sorted(set(LAYERS) - {"ttt"})) for _ in range(2)]
    how = {"layers": layers, "mlp": rng.choice(("swiglu", "swiglu", "moe")), "keep": rng.random() < 0.5 or None,
           "recompute": rng.choice((None, "block", "mlp")), "inference": rng.random() < 0.3 or None}  # fmt: skip
    T = max(2, min(case.T, 40))
    cu = None if case.cu is None else (*(min(c, T) for c in case.cu[:-1]), T)
    return case.but(T=T, cu=cu, dtype="fp64", how=how)


FIXED = (
    "attention",
    "forgetting_attention",
    "mla",
    "short_conv",
    *(r.name for r in RECURRENCES),
)
"""What has the same bits in deterministic mode."""


def _bits(rng: Random, case: Case) -> Case:
    of = rng.choice(FIXED)
    T = rng.randint(1, 260)
    cu = None if rng.random() < 0.3 else (0, *sorted(rng.randint(0, T) for _ in range(rng.randint(0, 4))), T)
    plain = _MORE.get(of, _recurrence)(rng, case.but(op=of, T=T, cu=cu, B=1 if cu else case.B, multiple_of=None))
    documents = 1 if cu is None else len(cu) - 1
    how = PLAIN | {"of": of, "order": rng.sample(range(documents), documents)}
    changes = {"T": T, "cu": cu, "deterministic": True, "scan": "ring", "multiple_of": None, "validate": "first"}
    return plain.but(op="bits", kind=rng.choice(("contiguous", "zigzag")), **changes, how=how)


_MORE: dict[str, Callable[[Random, Case], Case]] = {
    "attention": _attention, "forgetting_attention": _forgetting, "mla": _mla, "sparse_attention": _sparse,
    "short_conv": _conv, "token_shift": _conv, "bidirectional": _bidirectional, "scan": _scan, "moves": _moves,
    "grid": _grid,
    "running_sum": _running,
    "loss": _loss, "grouped_gemm": _grouped, "decoding": _decoding, "chosen": _chosen, "model": _model,
    "resume": _resume, "log_linear_attention": _log_linear, "training": _training, "bits": _bits,
}  # fmt: skip
