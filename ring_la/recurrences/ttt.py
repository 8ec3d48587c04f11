"""TTT-Linear: a state that is a linear model, trained by gradient descent on the tokens as they come.

    inner model   f(x) = Wᵀ x + c,      inner loss of a token   ℓ = ½ |norm(f(k)) − (v − k)|²
    W_t = W₀ − η_t Σ_{s ≤ t} ∂ℓ_s/∂W at W₀,       o_t = z + norm(z),   z = W_tᵀ q + c_t

W₀ is what the mini-batch of t starts from: all its tokens take their gradients there, so they are one product of
matrices. The norm (layer norm with its own weight and bias a head) makes the step no affine function of W₀: the algebra
of `ring_la.algebra` has no map of a run of tokens that could be made before the state arrives, and states go from rank
to rank in order (`linear.in_order`), a group of heads at a time. Without the norms and c, in mini-batches of one token,
it would be the delta rule with β = η.

c is one more row of W, of a key that is one. A run may end within a mini-batch, and so may a call: what goes on is W₀
and the sum of gradients so far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..blockwise import by_block, fixed
from ..checks import check_int, check_least, is_int
from ..errors import ArgumentError, UnsupportedError
from ..kernels.gradient_steps.mini_batches import mini_batches, unsupported
from ..linear.in_order import in_order
from ..linear.stretches import DocumentRun
from ..outputs import LinearAttentionOutput
from .arguments import Argument
from .definition import CommonOptions
from .recurrence import recurrence


def _rate(normal: Callable[..., Tensor], drawn: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """An example of learning rates: larger ones make steps that magnify every rounding."""
    return 0.1 * normal(*shape).sigmoid()


def _near_one(normal: Callable[..., Tensor], drawn: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """An example of a norm's weight."""
    return 1 + 0.1 * normal(*shape)


@recurrence(
    paper="Sun et al. 2024, arXiv 2407.04620, §2.4 and 2.7, in the mini-batches of fla-core's ops/ttt",
    equation="W ← W₀ − η Σ ∂/∂W ½ ‖norm(W₀ᵀ k) − (v − k)‖² over the mini-batch so far, o = z + norm(z), z = Wᵀ q",
    arguments=dict(
        q=Argument("BTHK", "query"), k=Argument("BTHK", "key"), v=Argument("BTHK", "value"),
        eta=Argument("BTH", _rate), w=Argument("HK", _near_one), b=Argument("HK"),
    ),
    reference=reference.ttt_linear,
    states=("HKK", "HK", "HKK", "HK"),
    flags=dict(mini_batch=4),
    same_bits=True,
    opaque=True,
)  # fmt: skip
def ttt_linear(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor, mini_batch: int = 16, eps: float = 1e-6,
    first: int | tuple[int, ...] = 0, *, options: CommonOptions,
) -> LinearAttentionOutput:  # fmt: skip
    """TTT-Linear: W ← W₀ − η Σ ∂/∂W ½ |norm(W₀ᵀ k + c) − (v − k)|² over the mini-batch so far, o = z + norm(z) with
    z = scale · Wᵀ q + c.

    Args:
        q, k, v: ``[B, T, H, K]``, of one width. eta: learning rate of each token ``[B, T, H]``: of all gradients of its
            mini-batch as it reads them, and the last token's as the next mini-batch starts from them.
        w, b: weight and bias of the norm ``[H, K]``. eps: added to its variance.
        mini_batch: tokens whose gradients are taken at one W₀, counted from the start of each document.

        first: tokens of its mini-batch that each document's initial state has seen, one int for all or a tuple of N.

    States are ``(W [N,H,K,K], c [N,H,K])`` as the mini-batch began, and the sums of its gradients so far, in the same
    shapes: zero where one begins, and not read there (``first=0``). Behind a whole mini-batch W and c are those after
    its step; a shorter one makes it where its last η is known, ``W − η ΣdW``. A rank waits for the one before it, a
    group of heads at a time. Mini-batches of 16, 32 or 64 in bf16 or fp16, K up to 128, go by kernels on CUDA; others
    by PyTorch's operations, in fp32 or wider.
    """
    check_int("mini_batch", mini_batch, 1)
    check_least("eps", eps)
    if isinstance(first, list) or not all(is_int(n, 0) for n in _each(first)):
        raise ArgumentError("first", "an int ≥ 0, or a tuple of them", repr(first))
    B, _, H, K = q.shape
    scale = float(options.scale)  # type: ignore[arg-type]
    kernels = _by_kernels([q, k, v, eta, w, b], mini_batch, scale, options)
    seen = [n % mini_batch for n in _per_document(first, options, B)]
    wide = functools.reduce(torch.promote_types, (t.dtype for t in (q, k, v, eta, w, b)), torch.float32)
    W0 = _start(options, seen, H, K, q.new_empty(0, dtype=wide))
    body, shared = MiniBatches(mini_batch, eps, scale, kernels), [t.to(wide) for t in (w, b)]
    end: Tensor | None
    if kernels and options.layout is None and options.cu_seqlens is None and not seen[0]:
        o, end = body.whole(W0, q, k, v, eta, *shared)
    else:
        tokens = [q.to(wide), *(t if kernels else t.to(wide) for t in (k, v)), eta.to(wide)[..., None]]
        z, end = in_order(body, W0, tokens, shared, seen, options)

        def read(z: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return (z + _normal(z, eps)[0] * w.to(wide) + b.to(wide)).to(v.dtype)

        o = by_block(read, z, layout=options.layout, shared=(w, b))
    final: Any = None
    if end is not None and options.output_final_state:
        final = (end[:, :, 0, :-1], end[:, :, 0, -1], end[:, :, 1, :-1], end[:, :, 1, -1])
    return LinearAttentionOutput(o, final)


def one_token(
    tokens: Sequence[Tensor], w: Tensor, b: Tensor, S: Tensor, seen: Tensor, size: int, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """`ttt_linear` of one more token of each document, by the device alone: o ``[N, 1, H, K]`` and the state after it.

    Args:
        tokens: q, k, v ``[N, 1, H, K]`` and η ``[N, 1, H]``. w, b: of the norm ``[H, K]``. size: of a mini-batch.
        S: W over c, and the gradients so far ``[N, H, 2, K+1, K]``. seen: tokens before, int64 ``[N]``.
    """
    q, k, v, eta = (t.transpose(1, 2).to(S.dtype) for t in tokens)
    eta, place, rows = eta[..., None], seen % size, (-1, 1, 1, 1)
    W, G = S.unbind(2)
    G = torch.where((place == 0).view(rows), 0, G)
    target, one = v - k, q.new_ones(*q.shape[:3], 1)
    q, k = torch.cat([q * q.shape[3] ** -0.5, one], -1), torch.cat([k, one], -1)
    w, b = w.to(S.dtype), b.to(S.dtype)
    G = G + k.mT @ _inner_gradient(k @ W, target, w, b, eps)
    z = (q @ W - eta * (q @ G)).transpose(1, 2)
    last = (place == size - 1).view(rows)
    state = torch.stack([torch.where(last, W - eta * G, W), torch.where(last, 0, G)], 2)
    return (z + _normal(z, eps)[0] * w + b).to(tokens[2].dtype), state


def _by_kernels(given: Sequence[Tensor], size: int, scale: float, options: CommonOptions) -> bool:
    """Whether a call goes by the kernels, where a mini-batch is whole."""
    if options.backend == "torch":
        return False
    why = "deterministic=True fixes PyTorch's order" if fixed(options.layout) else unsupported(given, size, scale)
    if why and options.backend == "triton":
        raise UnsupportedError("backend", "one that can run this", f"'triton': {why}", "Use backend='torch'")
    return not why


def _each(first: object) -> tuple[Any, ...]:
    return first if isinstance(first, tuple) else (first,)


def _per_document(first: int | tuple[int, ...], options: CommonOptions, B: int) -> list[int]:
    """`first` of every document, or row of a batch."""
    layout, cu = options.layout, options.cu_seqlens
    packed = cu is not None or (layout is not None and layout.packed)
    N = B if cu is None else cu.numel() - 1
    if layout is not None and layout.packed:
        N = layout.num_documents
    given = _each(first)
    if len(given) not in (1, N):
        raise ArgumentError("first", f"an int, or a tuple of {N}", repr(first))
    if not packed and len(set(given)) > 1:
        hint = "Put the rows behind one another, with their offsets"
        raise UnsupportedError("first", "one number for all rows of a batch that is not packed", repr(first), hint)
    return [*given] * (N if len(given) == 1 else 1)


def _start(options: CommonOptions, seen: list[int], H: int, K: int, like: Tensor) -> Tensor:
    """W₀ over c, and the gradients so far ``[N, H, 2, K+1, K]``."""
    if options.initial_state is None:
        return like.new_zeros(len(seen), H, 2, K + 1, K)
    W, c, dW, dc = (t.to(like.dtype) for t in options.initial_state)
    within = torch.tensor([n > 0 for n in seen], device=like.device)[:, None, None, None]
    before, sums = torch.cat([W, c[:, :, None]], 2), torch.cat([dW, dc[:, :, None]], 2)
    return torch.stack([before, torch.where(within, sums, 0)], 2)


def _normal(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x` with mean 0 and variance 1, and the deviation it had."""
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return centred / deviation, deviation


@dataclass(frozen=True)
class MiniBatches:
    """A run of tokens, a mini-batch at a time; `kernels`: whole ones by those."""

    size: int
    eps: float
    scale: float
    kernels: bool = False

    def __call__(
        self, run: DocumentRun, S: Tensor, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor]:
        """z of the tokens, and the state after them, given that before them ``[B, H, 2, K+1, K]``."""
        n, out, tokens = run.stop - run.start, [], (q, k, v, eta)
        first = min(n, -run.position % self.size) if self.kernels else n
        last = first + (n - first) // self.size * self.size
        if first:
            z, S = self._plain(run.position, S, [t[:, :first] for t in tokens], w, b)
            out.append(z)
        if last > first:
            qs, ks, vs, rates = (t[:, first:last] for t in tokens)
            z, S = self._whole(S, [qs.to(ks.dtype), ks, vs, rates[..., 0]], w, b, norm=False)
            out.append(z)
        if n > last:
            z, S = self._plain(run.position + last, S, [t[:, last:] for t in tokens], w, b)
            out.append(z)
        return torch.cat(out, 1), S

    def whole(
        self, S: Tensor, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor]:
        """o of documents' tokens from their start, and the state after them."""
        full = q.shape[1] // self.size * self.size
        out, tokens = [q[:, :0]], (q, k, v, eta)
        if full:
            o, S = self._whole(S, [t[:, :full] for t in tokens], w, b, norm=True)
            out.append(o)
        if full < q.shape[1]:
            qs, ks, vs, rates = (t[:, full:] for t in tokens)
            z, S = self._plain(0, S, [qs.to(S.dtype), ks, vs, rates[..., None]], w, b)
            out.append((z + _normal(z, self.eps)[0] * w + b).to(q.dtype))
        return torch.cat(out, 1), S

    def _whole(
        self, S: Tensor, tokens: Sequence[Tensor], w: Tensor, b: Tensor, norm: bool
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Whole mini-batches of q, k, v, η by the kernels: z, or (`norm`) o, and the state after them."""
        (q, k, v, eta), W, c = tokens, S[:, :, 0, :-1], S[:, :, 0, -1]
        z, W, c = mini_batches(q, k, v, eta, w, b, W, c, self.size, self.scale, self.eps, norm)
        end = torch.cat([W, c[:, :, None]], 2).to(S.dtype)
        return z, torch.stack([end, torch.zeros_like(end)], 2)

    def _plain(
        self, position: int, S: Tensor, tokens: Sequence[Tensor], w: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """z of q, k, v, η, whose first token has this position, and the state after them, in PyTorch's operations."""
        W, G = S.unbind(2)
        q, k, v, eta = (t.transpose(1, 2).to(S.dtype) for t in (tokens[0] * self.scale, *tokens[1:]))
        one = q.new_ones(*q.shape[:3], 1)
        target, q, k = v - k, torch.cat([q, one], -1), torch.cat([k, one], -1)
        out, at, n = [], 0, q.shape[2]
        while at < n:
            stop = min(n, at + self.size - (position + at) % self.size)
            part = slice(at, stop)
            d = _inner_gradient(k[:, :, part] @ W, target[:, :, part], w, b, self.eps)
            read = q[:, :, part] @ G + (q[:, :, part] @ k[:, :, part].mT).tril() @ d
            out.append(q[:, :, part] @ W - eta[:, :, part] * read)
            G = G + k[:, :, part].mT @ d
            at = stop
            if (position + at) % self.size == 0:
                W, G = W - eta[:, :, at - 1, :, None] * G, torch.zeros_like(G)
        return torch.cat(out, 2).transpose(1, 2), torch.stack([W, G], 2)


def _inner_gradient(x: Tensor, target: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """∂/∂x ½ |norm(x) − target|², ``[B, H, n, K]``."""
    hat, deviation = _normal(x, eps)
    d = (w[:, None] * hat + b[:, None] - target) * w[:, None]
    return (d - d.mean(-1, keepdim=True) - hat * (d * hat).mean(-1, keepdim=True)) / deviation
