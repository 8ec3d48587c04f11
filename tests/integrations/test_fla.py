"""fla-core's context-parallel operators over ring_la, with contexts as fla-core makes them."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import ring_la
from ring_la.errors import ArgumentError, RingLAError, UnsupportedError
from ring_la.integrations import fla
from tests.support.pool import group

OFFSETS = [0, 5, 12, 13, 24]


def upstream(path: str, name: str) -> list[str]:
    """The arguments of a function of fla-core, which is read and not imported."""
    file = next((f for f in importlib.metadata.files("fla-core") or [] if str(f) == f"fla/{path}"), None)
    assert file is not None, path
    tree = ast.parse(file.read_text())
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    return [a.arg for a in found.args.args]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("ops/gated_delta_rule/chunk.py", "chunk_gated_delta_rule"),
        ("ops/kda/chunk.py", "chunk_kda"),
        ("modules/causal_conv1d/cp.py", "causal_conv1d_cp"),
    ],
)
def test_signatures_are_upstream_s(path, name):
    try:
        importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no fla-core here")
    ours = list(inspect.signature(getattr(fla, name)).parameters)
    assert [argument for argument in ours if argument != "kwargs"] == upstream(path, name)


def context(rank: int, size: int, layout: str, offsets: list[int]) -> SimpleNamespace:
    """What `build_cp_context` says of one rank, as far as it is read."""
    parts = size if layout == "contiguous" else 2 * size
    length = offsets[-1] // parts
    cuts, earlier, at = [0], [], 0
    for part in [rank] if layout == "contiguous" else [rank, parts - 1 - rank]:
        start = part * length
        cuts += [at + o - start for o in offsets if start < o < start + length] + [at + length]
        earlier.append(start - max(o for o in offsets if o <= start))
        at += length
    found = SimpleNamespace(group=group(), layout=layout, cu_seqlens=torch.tensor(cuts), cu_seqlens_cpu=None)
    if layout == "contiguous":
        found.pre_num_conv_tokens = earlier[0]
    else:
        found.part_len, found.pre_num_conv_tokens_by_part = length, tuple(earlier)
    return found


def inputs(channels: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 24, 2, 8), torch.randn(1, 24, 2, 8), torch.randn(1, 24, 4, 6)
    return [q, k, v, torch.randn(1, 24, 4, *channels), torch.randn(1, 24, 4)]


def check(rank: int, layout: str, offsets: list[int]) -> None:
    """Outputs and gradients are those of one device, whatever the context says of where documents begin."""
    told = context(rank, 2, layout, offsets)
    mine = fla.layout_of(told)
    assert list(mine.cu_seqlens) == offsets
    assert fla.layout_of(told) is mine
    cu = torch.tensor(offsets)
    A_log, bias = torch.randn(4), torch.randn(4)
    gate = {"use_gate_in_kernel": True, "A_log": A_log}
    strong = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "use_qk_l2norm_in_kernel": True}
    for rule, channels, more in (
        (fla.chunk_gated_delta_rule, (), {"dt_bias": bias}),
        (fla.chunk_kda, (8,), {"dt_bias": bias.repeat_interleave(8), "lower_bound": -5.0}),
    ):
        whole = [x.requires_grad_() for x in inputs(channels)]
        expected, none = rule(*whole, cu_seqlens=cu, **gate, **strong, **more)
        assert none is None
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        wanted = torch.autograd.grad((expected * weight).sum(), whole)
        local = [mine.shard(x.detach()).requires_grad_() for x in whole]
        found, _ = rule(*local, cp_context=told, **gate, **strong, **more)
        torch.testing.assert_close(found, mine.shard(expected))
        for one, other in zip(torch.autograd.grad((found * mine.shard(weight)).sum(), local), wanted):
            torch.testing.assert_close(one, mine.shard(other), rtol=1e-4, atol=1e-5)
    x, w = torch.randn(1, 24, 6, generator=torch.Generator().manual_seed(2)), torch.ones(6, 4)
    expected = ring_la.short_conv(x, w, None, "silu", cu_seqlens=cu).o + x
    found = fla.causal_conv1d_cp(mine.shard(x), w, None, "swish", cp_context=told, residual=mine.shard(x))
    torch.testing.assert_close(found, mine.shard(expected))


@pytest.mark.parametrize(("layout", "offsets"), [("contiguous", OFFSETS), ("zigzag", OFFSETS), ("zigzag", [0, 24])])
def test_a_split_call_is_one_device_s(ranks, layout, offsets):
    ranks.run(2, check, layout, offsets)


def check_one_rank(rank: int) -> None:
    """What rank 1 alone gives wrong, a context or an argument of a call, is an error on both."""
    q, k, v, g, beta = inputs(())
    half = [x[:, :12] for x in (q, k, v, -g.abs(), beta.sigmoid())]

    def told(**more) -> SimpleNamespace:
        return SimpleNamespace(**vars(context(rank, 2, "contiguous", OFFSETS)) | (more if rank == 1 else {}))

    for more, said in (
        ({"cu_seqlens": None}, "cu_seqlens"),
        ({"layout": "striped"}, "striped"),
        ({"layout": "zigzag", "part_len": 5, "pre_num_conv_tokens_by_part": (0, 3)}, "part_len"),
    ):
        with pytest.raises(ArgumentError, match=rf"cp_context: expected .*{said}"):
            fla.layout_of(told(**more))
    cp = told()
    for more, said in (
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, "A_log: expected a float tensor of 4 numbers"),
        ({"initial_state": torch.zeros(1, 4, 8, 6)}, "initial_state: expected none with a cp_context"),
        ({"use_beta_sigmoid_in_kernel": "no"}, "use_beta_sigmoid_in_kernel: expected True or False"),
        ({"head_first": True}, "kwargs: expected"),
    ):
        with pytest.raises(RingLAError, match=said):
            fla.chunk_gated_delta_rule(*half, cp_context=cp, **(more if rank == 1 else {}))
    x, w = torch.randn(1, 12, 6), torch.ones(6, 4)
    for more, said in (({"activation": "relu"}, "activation"), ({"residual": x[:, :1]}, "residual")):
        with pytest.raises(RingLAError, match=f"{said}: expected"):
            fla.causal_conv1d_cp(x, w, cp_context=cp, **(more if rank == 1 else {}))


def test_what_one_rank_alone_gives_wrong_is_an_error_on_both(ranks):
    ranks.run(2, check_one_rank, timeout=30)


def check_refreshed(rank: int) -> None:
    """Offsets that are written over are those of another split."""
    told = context(rank, 2, "contiguous", [0, 5, 24])
    assert list(fla.layout_of(told).cu_seqlens) == [0, 5, 24]
    if rank == 0:
        told.cu_seqlens.copy_(torch.tensor([0, 7, 12]))
    else:
        told.cu_seqlens.add_(0)
    assert list(fla.layout_of(told).cu_seqlens) == [0, 7, 24]


def test_a_context_whose_offsets_are_refreshed_is_another_layout(ranks):
    ranks.run(2, check_refreshed)


WRONG = {
    "q": ({"q": None}, {"q": torch.zeros(1, 24, 0, 8)}),
    "k": ({"k": None},),
    "v": ({"v": None}, {"v": torch.zeros(1, 24, 3, 6)}),
    "initial_state": ({"initial_state": [3], "state_v_first": True},),
    "state_v_first": ({"state_v_first": "no"},),
    "allow_neg_eigval": ({"allow_neg_eigval": "no"},),
    "cu_seqlens_cpu": ({"cu_seqlens_cpu": torch.tensor([0, 24])},),
    "use_gate_in_kernel": ({"use_gate_in_kernel": "no"},),
    "A_log": ({"use_gate_in_kernel": True, "A_log": 3.0}, {"use_gate_in_kernel": True, "A_log": torch.zeros(1)}),
    "dt_bias": ({"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(1)},),
    "cp_context": ({"cp_context": 3}, {"cp_context": {}}),
}


@pytest.mark.parametrize("rule", [fla.chunk_gated_delta_rule, fla.chunk_kda])
def test_wrong_arguments_are_named(rule):
    given = dict(zip(("q", "k", "v", "g", "beta"), inputs((8,) if rule is fla.chunk_kda else ())))
    given |= {"g": -given["g"].abs(), "beta": given["beta"].sigmoid()}
    for name, calls in WRONG.items():
        for more in calls:
            with pytest.raises(ArgumentError, match=rf"^{name}: expected"):
                rule(**(given | more))


def test_kda_wants_the_bound_that_a_safe_gate_is_made_with():
    q, k, v, g, beta = inputs((8,))
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "safe_gate": True}
    with pytest.raises(ArgumentError, match="lower_bound: expected one with safe_gate"):
        fla.chunk_kda(q, k, v, g, beta, **gate)


@pytest.mark.parametrize("rule", [fla.chunk_gated_delta_rule, fla.chunk_kda])
def test_strengths_made_here_are_not_rounded_to_sixteen_bits(rule):
    q, k, v, g, beta = (x.bfloat16() for x in inputs((8,) if rule is fla.chunk_kda else ()))
    found, _ = rule(q, k, v, -g.float().abs(), beta, use_beta_sigmoid_in_kernel=True)
    expected, _ = rule(q, k, v, -g.float().abs(), beta.float().sigmoid())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_states_go_in_and_out_on_one_device_alone():
    q, k, v, g, beta = inputs(())
    g, beta = -g.abs(), beta.sigmoid()
    state = torch.randn(1, 4, 8, 6)
    whole, final = fla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
    turned, last = fla.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state.mT, output_final_state=True, state_v_first=True
    )
    torch.testing.assert_close(turned, whole)
    torch.testing.assert_close(last.mT, final)
    with pytest.raises(ArgumentError, match="allow_neg_eigval"):
        fla.chunk_gated_delta_rule(q, k, v, g, beta, allow_neg_eigval=True)
    with pytest.raises(UnsupportedError, match=r"kwargs: expected .*, got head_first"):
        fla.chunk_gated_delta_rule(q, k, v, g, beta, head_first=True)
    with pytest.raises(ArgumentError, match="cp_context: expected one of fla-core's"):
        fla.layout_of(SimpleNamespace(group=None, layout="striped"))
