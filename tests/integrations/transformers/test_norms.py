"""Norms of Transformers' models by ours, as on CUDA: which are, and the same outputs and gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from ring_la import ContextParallel
from ring_la.integrations.transformers import norms, parallelize
from tests.support.pool import group
from tests.support.transformers_models import CASES, VOCABULARY

WIDTH = 24


class NormNearly(nn.Module):
    """Like one of them, but for a hundredth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * 1.0001


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (LlamaRMSNorm, (False, True)),
        (Qwen3NextRMSNorm, (True, True)),
        (Qwen3NextRMSNormGated, (False, True)),
        (lambda width: MambaRMSNormGated(width, 8), None),  # it is gated before it is normed, in groups
        (lambda width: nn.LayerNorm(width, bias=False), None),
        (lambda width: nn.BatchNorm1d(width), None),
        (NormNearly, None),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_which_norms_are_ours(make, want, device):
    with torch.device(device):
        form = norms.form_of(make(WIDTH))
    assert (None if form is None else (form.one_more, form.silu)) == want


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3NextRMSNorm, Qwen3NextRMSNormGated])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients(kind, dtype, monkeypatch):
    monkeypatch.setattr(norms, "fused", lambda x: True)
    norm, dice = kind(WIDTH).to(dtype), torch.Generator().manual_seed(0)
    form = norms.form_of(norm)
    x, gate, do = (torch.randn(2, 5, WIDTH, generator=dice).to(dtype).requires_grad_() for _ in range(3))
    norm.weight.data += 0.3 * torch.randn(WIDTH, generator=dice).to(dtype)
    given = (x, gate)[: len(form.names)]
    found = []
    for forward in (kind.forward, norms.norm_forward(kind, form)):
        o = forward(norm, *given)
        found.append([o, *torch.autograd.grad(o, (*given, norm.weight), do)])
    near = {torch.float32: 1e-5, torch.bfloat16: 2**-5}[dtype]
    for ours, theirs in zip(*reversed(found), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)


def both_ways(rank: int, name: str) -> list[list[Tensor | None]]:
    """Logits, the loss and all gradients of a parallelized model, with the library's norms and with ours."""
    ids, found, calls = torch.arange(18).view(1, 18) * 7 % VOCABULARY, [], []
    plain = norms.rms_norm
    with mock.patch.object(norms, "rms_norm", lambda *x, **how: calls.append(0) or plain(*x, **how)):
        model = parallelize(CASES[name].make(), ContextParallel(group(), scan="ring"))
        for on_cuda in (False, True):
            del calls[:]
            with mock.patch.object(norms, "fused", lambda x, on=on_cuda: on):
                out = model(input_ids=ids, labels=ids)
                grads = torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True)
            found.append([out.logits.detach(), out.loss.detach(), *grads])
            assert bool(calls) == on_cuda
    assert len(calls) >= 2 * len(model.model.layers)
    return found


def test_a_model_takes_them(ranks):
    """A parallelized model has ours where a GPU would be, and gives what it gave."""
    ((theirs, ours),) = ranks.run(1, both_ways, "qwen3_next")
    for got, want in zip(ours, theirs, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_others_stay_the_library_s(monkeypatch):
    """A bf16 vector beside fp32 weights: the library gives fp32."""
    monkeypatch.setattr(norms, "fused", lambda x: True)
    norm = LlamaRMSNorm(WIDTH)
    form = norms.form_of(norm)
    assert norms.norm_forward(LlamaRMSNorm, form)(norm, torch.ones(1, WIDTH).bfloat16()).dtype == torch.float32
    assert not norms.takes(form, norm.weight, None)
