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
from ring_la.errors import ArgumentError, UnsupportedError
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
    with pytest.raises(UnsupportedError, match="initial_state: expected none with a cp_context"):
        fla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, cp_context=SimpleNamespace())
    with pytest.raises(ArgumentError, match="allow_neg_eigval"):
        fla.chunk_gated_delta_rule(q, k, v, g, beta, allow_neg_eigval=True)
    with pytest.raises(UnsupportedError, match=r"kwargs: expected .*, got head_first"):
        fla.chunk_gated_delta_rule(q, k, v, g, beta, head_first=True)
    with pytest.raises(ArgumentError, match="cp_context: expected one of fla-core's"):
        fla.layout_of(SimpleNamespace(group=None, layout="striped"))
