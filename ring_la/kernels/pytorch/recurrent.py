"""The recurrent mode in PyTorch: the rule's own equation, a token at a time.

Right for decoding and very short sequences. Gradients and summaries are those of the chunked form, which computes
the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...algebra import Rule
from ...autograd import full_precision
from ..protocol import Border, Inputs, Output, Summary
from .chunked import ChunkedRecurrence, ChunkTerms


class TokenRecurrence(ChunkedRecurrence):
    """`ChunkedRecurrence` with the output computed token by token."""

    def output(
        self, S0: Tensor | None, summary: Summary[ChunkTerms] | None = None, border: Border | None = None
    ) -> Output:
        assert border is None
        with full_precision(self.inputs.q):
            return Output(*self._tokens(S0))

    def _tokens(self, S0: Tensor | None) -> tuple[Tensor, Tensor]:
        x, c = self._wide_inputs(), self.chunks
        q = x.q * self.scale
        S_end = self._states(S0, q).clone()
        S, outputs = S_end[:, 0], []
        for t in range(c.T):
            if c.packed:
                piece = c.piece_of_token[t : t + 1]
                S = S_end.index_select(1, piece)[:, 0]
            S = step(self.rule, S, Inputs(*(None if y is None else y[:, t] for y in x)))
            outputs.append((q[:, t, :, None, :] @ (S if self.rule.reads == "keys" else S.mT))[:, :, 0])
            if c.packed:
                S_end.index_copy_(1, piece, S[:, None])
        like = x.like_output(self.rule)
        o = torch.stack(outputs, 1) if outputs else like.new_zeros(like.shape)
        return o.to(self.inputs.v.dtype), S_end if c.packed else S[:, None].clone()

    def _wide_inputs(self) -> Inputs:
        heads = self.inputs.v.shape[2]
        wide = (None if x is None else x.to(self.dtype) for x in self.inputs)
        return Inputs(*(x if x is None else x.repeat_interleave(heads // x.shape[2], 2) for x in wide))


def step(rule: Rule, S: Tensor, x: Inputs) -> Tensor:
    """The state ``[..., K, V]`` after one token, whose tensors are ``[..., D]`` (g and beta one dimension less)."""
    decayed = S
    if rule.decay != "none":
        decayed = S * (x.g.exp()[..., None, None] if rule.decay == "scalar" else x.g.exp()[..., None])
    if rule.write in ("delta", "erase"):
        reads = x.k if rule.write == "delta" else x.a
        missing = x.v - (reads[..., None, :] @ decayed)[..., 0, :]
        return decayed + (x.beta[..., None] * x.k)[..., None] * missing[..., None, :]
    if rule.write == "dplr":
        decayed = decayed + x.b[..., None] * (x.a[..., None, :] @ S)
    return decayed + x.k[..., None] * x.v[..., None, :]
