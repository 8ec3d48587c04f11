"""Bad arguments are named, on every backend, also in a call that is like one before; no keyword is swallowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ring_la
from tests.support.recurrence_cases import COMPOSED, RECURRENCES, make_inputs

BAD = [
    (dict(k=torch.zeros(1, 8, 2, 5)), "k"),
    (dict(v=torch.zeros(1, 7, 4, 5)), "v"),
    (dict(v=torch.zeros(1, 8, 3, 5)), "v"),
    (dict(v=torch.zeros(8, 4, 5)), "v"),
    (dict(q=torch.zeros(1, 8, 2, 6, dtype=torch.int64)), "q"),
    (dict(q="q"), "q"),
    (dict(q=None), "q"),
    (dict(k=None), "k"),
    (dict(g=None), "g"),
    (dict(beta=None), "beta"),
    (dict(k=torch.zeros(1, 8, 2, 6, dtype=torch.float16)), "k"),
    (dict(g=torch.zeros(1, 8, 4, 6)), "g"),
    (dict(beta=torch.zeros(1, 8, 3)), "beta"),
    (dict(beta=torch.zeros(1, 8, 4, device="meta")), "beta"),
    (dict(initial_state=torch.zeros(2, 4, 6, 5)), "initial_state"),
    (dict(initial_state=torch.zeros(1, 4, 6, 5, dtype=torch.int32)), "initial_state"),
    (dict(cu_seqlens=torch.tensor([1, 8])), "cu_seqlens"),
    (dict(cu_seqlens=torch.tensor([0, 5, 4, 8])), "cu_seqlens"),
    (dict(cu_seqlens=torch.tensor([0, 9])), "cu_seqlens"),
    (dict(cu_seqlens=[0, 8]), "cu_seqlens"),
    (dict(mode="fast"), "mode"),
    (dict(backend="cuda"), "backend"),
    (dict(backend="triton"), "backend"),
    (dict(scale="1"), "scale"),
    (dict(scale=float("nan")), "scale"),
    (dict(scale=True), "scale"),
    (dict(use_qk_l2norm="no"), "use_qk_l2norm"),
    (dict(output_final_state=None), "output_final_state"),
    (dict(in_place="no"), "in_place"),
    (dict(layout="zigzag"), "layout"),
]


@pytest.mark.parametrize(("change", "name"), BAD)
def test_bad_arguments_are_named(change, name):
    x = {n: t.detach().float() for n, t in make_inputs("gated_delta_rule", 1, 8).items()}
    for backend in ("torch", "reference"):
        with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+"):
            ring_la.gated_delta_rule(**({"backend": backend} | x | change))


BAD_OF_THEIR_OWN = [
    ("linear_attention", dict(causal=None), "causal"),
    ("linear_attention", dict(normalize="no"), "normalize"),
    ("lightning_attention", dict(g=None, layer_idx=0.5), "layer_idx"),
    ("lightning_attention", dict(layer_idx=1, num_layers=2), "layer_idx"),
    ("retention", dict(g=torch.zeros(4, dtype=torch.int64)), "g"),
    ("hgrn2", dict(q=torch.zeros(1, 8, 2, 6, dtype=torch.bool)), "q"),
    *(("linear_attention", dict(normalize=True, eps=e), "eps") for e in (-1.0, float("inf"), "x")),
    *(("ttt_linear", dict(eps=e), "eps") for e in (None, -1.0, float("nan"))),
    ("ttt_linear", dict(first=True), "first"),
    *((f"preconditioned_{r}", dict(base=b), "base") for r in ("kda", "gated_delta_rule") for b in (None, 0.5, "x")),
    ("mamba2", dict(dt_softplus="no"), "dt_softplus"),
    ("mamba2", dict(x=torch.zeros(1, 8, 4, 5).to(torch.float8_e5m2)), "x"),
    *(("mamba2", {n: torch.zeros(4, device="meta")}, n) for n in ("A", "D", "dt_bias")),
]


@pytest.mark.parametrize(("function", "change", "name"), BAD_OF_THEIR_OWN)
def test_bad_arguments_of_one_function_are_named(function, change, name):
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+"):
        getattr(ring_la, function)(**(make_inputs(function, 1, 8) | change))


@pytest.mark.parametrize("function", [*RECURRENCES, *COMPOSED])
def test_sparse_tensors_and_no_heads_are_named(function):
    definition = getattr(ring_la, function).definition
    given = make_inputs(function, 1, 8)
    tensors = {n: t.detach() for n, t in given.items() if isinstance(t, Tensor)}
    getattr(ring_la, function)(**given)  # what is like a call that was checked is not checked again
    for name, t in tensors.items():
        with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+sparse"):
            getattr(ring_la, function)(**(given | {name: t.to_sparse()}))
    for name in (n for n, a in definition.arguments.items() if a.values and "H" in a.shape and n in tensors):
        none = tensors[name].narrow(definition.arguments[name].shape.index("H"), 0, 0)
        with pytest.raises(ring_la.ArgumentError, match=r"^\w+: expected .+, got .+"):
            getattr(ring_la, function)(**(given | {name: none}))


@pytest.mark.parametrize("function", [*RECURRENCES, *COMPOSED])
def test_no_channels_are_named_and_no_rows_are_a_batch(function):
    definition, given = getattr(ring_la, function).definition, make_inputs(function, 2, 5)
    tensors = {n: t.detach() for n, t in given.items() if isinstance(t, Tensor)}
    arguments = {n: definition.arguments[n] for n in tensors}

    def without(letter: str) -> dict[str, Tensor]:
        found = {n: a.shape.index(letter) for n, a in arguments.items() if letter in a.shape}
        return {n: tensors[n].narrow(dim, 0, 0) for n, dim in found.items()}

    for letter in {letter for a in arguments.values() for letter in a.shape} - set("BTGHV"):
        with pytest.raises(ring_la.ArgumentError, match=r"^\w+: expected .+, got .+"):
            getattr(ring_la, function)(**(given | without(letter)))
    o = getattr(ring_la, function)(**(given | without("B"))).o
    assert o.shape[:2] == (0, 5)


@pytest.mark.parametrize(
    ("change", "name"),
    [(dict(output_final_state=1), "output_final_state"), (dict(scale=True), "scale"), (dict(mode="fast"), "mode"),
     (dict(g=torch.zeros(1, 8, 6)), "g"), (dict(g=[0.0]), "g"), (dict(cu_seqlens=[0, 8]), "cu_seqlens"),
     (dict(initial_state=torch.zeros(2, 7)), "initial_state")],
)  # fmt: skip
def test_what_differs_from_a_checked_call_is_checked(change, name):
    x = make_inputs("hgrn", 1, 8) | dict(scale=1.0, output_final_state=True)
    ring_la.hgrn(**x)
    with pytest.raises(ring_la.ArgumentError, match=rf"^{name}: expected .+, got .+"):
        ring_la.hgrn(**(x | change))


def test_wrong_names_are_python_s_error():
    x = make_inputs("hgrn", 1, 8)
    for args, keywords in (((), {"x": x["x"]}), ((), x | {"y": 1}), ((x["x"], x["g"], 1), {}), ((x["x"],), x)):
        with pytest.raises(TypeError):
            ring_la.hgrn(*args, **keywords)


def test_unknown_keywords_are_not_swallowed():
    x = make_inputs("gla", 1, 8)
    with pytest.raises(TypeError, match="cu_seqlen"):
        ring_la.gla(**x, cu_seqlen=None)
    with pytest.raises(TypeError, match="beta"):
        ring_la.gla(**x, beta=x["q"])
    with pytest.raises(ring_la.ArgumentError, match=r"^cu_seqlens"):
        ring_la.gla(**make_inputs("gla", 2, 8), cu_seqlens=torch.tensor([0, 8]))
