"""yunchang's entry points over ring_la: its autograd Functions, functions and layers, with its signatures.

The Functions are real ``torch.autograd.Function`` classes under yunchang's contract, so that code written against it
can subclass them or mix forward and backward:

    saved tensors   (q, k, v, out, softmax_lse), varlen (…, cu_seqlens), zigzag varlen of several documents (…, half
                    indices)
    on ctx          every attribute that a released yunchang or xDiT backward reads, used by this forward or not

Tensors are ``[B, T, H, D]`` of this rank, equally long on all ranks of `group`; varlen tensors ``[T, H, D]`` with local
`cu_seqlens`, each document split over all ranks. `softmax_lse` is fp32 ``[B, H, T]``. Where yunchang does not do
what its arguments say, these do what they say: windows count from global positions, dropout's backward repeats the
forward's mask, gradients come in the inputs' dtype, and softcap, ALiBi, GQA and fp32 work in every split.

`attn_type` picks a kernel as far as it names one of ours: torch_math, torch_flash, torch_cudnn; fa and torch_efficient
take the fastest. `attn_processor` is kept on ctx, as upstream does; only its sparse Sage kernel uses it: refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm import Group
from ..errors import ArgumentError, UnsupportedError
from ..softmax import core, sharded
from ..softmax.backends import Ask, choose
from ..softmax.core import Plan, Saved, Tensors
from ..softmax.merge import wide
from ..softmax.scores import Scores
from ..softmax.strategies import Heads, HeadSplit, Job, Ring
from ..softmax.tokens import Run, Tokens

KERNELS = {
    "fa": None,
    "torch_efficient": None,
    "torch_math": "torch",
    "torch_flash": "flash",
    "torch_cudnn": "cudnn",
    "fa3": "flash_attn_3",
}
"""The backend that each of yunchang's attn_types asks for; None: the fastest."""

_groups: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()


def group_of(group: dist.ProcessGroup | None) -> Group:
    """The group as ring_la uses it, made once a process group."""
    group = dist.group.WORLD if group is None else group
    if group not in _groups:
        _groups[group] = Group(group, torch.distributed.constants.default_pg_timeout)
    return _groups[group]


# -- where tokens stand ------------------------------------------------------------------------------------


def tokens_of(kind: str, lengths: list[int], ranks: int, rank: int, device: torch.device, shifts: list[int]) -> Tokens:
    """The rows of a rank that holds `lengths` tokens of each document, every document split over all ranks."""
    runs, offset = [], 0
    for document, (n, shift) in enumerate(zip(lengths, shifts)):
        if kind == "zigzag" and n % 2:
            raise ArgumentError("q", "an even number of local tokens of each document for zigzag", n)
        if kind == "zigzag":
            spans = [(rank * n // 2, n // 2, 1), ((2 * ranks - 1 - rank) * n // 2, n // 2, 1)]
        else:
            spans = [(rank, n, ranks)] if kind == "stripe" else [(rank * n, n, 1)]
        for position, length, stride in spans:
            if length:
                runs.append(
                    Run(offset, length, ranks * sum(lengths[:document]) + position, position + shift, document, stride)
                )
                offset += length
    return Tokens(runs, offset, device)


@dataclass(frozen=True)
class Call:
    """What ctx carries under upstream's names, and what only this forward knows.

    Attributes:
        seed: of dropout's mask; None: unknown (the forward was not ours).
    """

    kind: str
    dropout_p: float
    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    attn_type: object
    seed: int | None = None

    def plan(
        self,
        x: Tensors,
        group: Group,
        heads: Heads | None = None,
        cu: list[int] | None = None,
        joint_rows: Tokens | None = None,
        joint_keys: Tokens | None = None,
    ) -> Plan:
        """The ring over `group`; with `heads`, x are tensors before the exchange, its tokens those after it."""
        if self.dropout_p and self.seed is None:
            raise UnsupportedError(
                "dropout_p", "0 where the forward was not ring_la's", self.dropout_p, "Its mask is lost"
            )
        left, right = self.window[0], 0 if self.causal else self.window[1]
        bounds = (None if w < 0 else w for w in (left, right))
        slopes = self.alibi_slopes
        if slopes is not None:
            slopes = slopes.to(wide(x.q.dtype)).reshape(-1, x.q.shape[2])
        scores = Scores(self.scale, float(self.softcap), *bounds, slopes, float(self.dropout_p), self.seed or 0)
        counts = {"q": x.q.shape[1], "k": x.k.shape[1]}
        if heads is not None:
            counts = {side: sum(n) for side, n in heads.tokens.items()}
            scores = scores.of_heads(heads.query_numbers(x.q.device))
        of = {side: [n] if cu is None else [b - a for a, b in zip(cu, cu[1:])] for side, n in counts.items()}
        ranks, device = range(group.size), x.q.device
        shifts = [group.size * (k - q) for q, k in zip(of["q"], of["k"])]
        rows = tuple(tokens_of(self.kind, of["q"], group.size, r, device, shifts) for r in ranks)
        keys = rows
        if of["k"] != of["q"]:
            keys = tuple(tokens_of(self.kind, of["k"], group.size, r, device, [0] * len(shifts)) for r in ranks)
        shapes = (x.q.shape[2], x.k.shape[2], x.q.shape[3], x.v.shape[3])
        ask = Ask(device, x.q.dtype, *shapes, scores, packed=cu is not None, repeatable=bool(self.deterministic))
        job = Job(choose(ask, kernel_of(self.attn_type)), scores, rows, keys, group=group)
        return Plan(job, Ring(), joint_rows, joint_keys, heads)


def kernel_of(attn_type: object) -> str | None:
    """The backend an attn_type asks for: an upstream AttnType, its value, or None."""
    name = getattr(attn_type, "value", attn_type)
    if name is None:
        return None
    if name not in KERNELS:
        raise UnsupportedError(
            "attn_type", f"None or one of {', '.join(KERNELS)}", repr(name), "It has no gradient here"
        )
    return KERNELS[name]


def options(
    kind: str,
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    attn_type: object,
) -> Call:
    """Upstream's arguments, checked, with a new seed where there is dropout."""
    if not 0 <= dropout_p < 1:
        raise ArgumentError("dropout_p", "0 ≤ dropout_p < 1", dropout_p)
    if len(window_size) != 2:
        raise ArgumentError("window_size", "(left, right), −1 for no bound", window_size)
    if softcap < 0:
        raise ArgumentError("softcap", "a number ≥ 0", softcap)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    seed = int(torch.randint(2**62, ())) if dropout_p else 0
    window = tuple(-1 if w is None else int(w) for w in window_size)
    return Call(
        kind, dropout_p, scale, bool(causal), window, softcap or 0.0, alibi_slopes, deterministic, attn_type, seed
    )


# -- autograd Functions ------------------------------------------------------------------------------------


def _forward(
    ctx, call: Call, q: Tensor, k: Tensor, v: Tensor, group, attn_type, attn_processor
) -> tuple[Tensor, Tensor]:
    k, v = k.contiguous(), v.contiguous()
    out, lse, _ = core.forward(call.plan(Tensors(q, k, v), group_of(group)), Tensors(q, k, v))
    ctx.save_for_backward(q, k, v, out, lse)
    remember(ctx, call, group, attn_type, attn_processor)
    return out, lse


def remember(ctx, call: Call, group, attn_type, attn_processor) -> None:
    """Everything upstream's backwards read, and our own record."""
    ctx.dropout_p, ctx.softmax_scale, ctx.causal = call.dropout_p, call.scale, call.causal
    ctx.window_size, ctx.softcap, ctx.alibi_slopes = call.window, call.softcap, call.alibi_slopes
    ctx.deterministic, ctx.group = call.deterministic, group
    ctx.attn_type, ctx.attn_processor = _upstream_type(attn_type), attn_processor
    ctx.ring_la = call
    ctx.set_materialize_grads(False)


def recall(ctx, kind: str) -> Call:
    """The call of a forward, ours or a subclass's that sets upstream's attributes or some of them."""
    own = getattr(ctx, "ring_la", None)
    if own is not None:
        return own
    values = {name: getattr(ctx, name, default) for name, default in UPSTREAM.items()}
    names = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")
    if values["softmax_scale"] is None:
        values["softmax_scale"] = ctx.saved_tensors[0].shape[-1] ** -0.5
    return Call(kind, *(values[n] for n in names), attn_type=None)


UPSTREAM = dict(
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
)
"""Attributes of ctx and what they mean where a subclass's forward leaves them out."""


def _upstream_type(attn_type: object) -> object:
    """What upstream's backward can read: its own AttnType where yunchang is loaded."""
    kernels = sys.modules.get("yunchang.kernels")
    if kernels is None or isinstance(attn_type, kernels.AttnType):
        return attn_type
    return kernels.AttnType.FA if attn_type is None else kernels.AttnType.from_string(attn_type)


def _backward(ctx, kind: str, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients for as many inputs as the forward had, q, k and v first."""
    q, k, v, out, lse = ctx.saved_tensors[:5]
    call, x = recall(ctx, kind), Tensors(q, k, v)
    saved = Saved(x, out, lse.to(wide(q.dtype)))
    grads = core.backward(call.plan(x, group_of(ctx.group)), saved, dout, dlse)
    return (grads.q, grads.k, grads.v, *[None] * (len(ctx.needs_input_grad) - 3))


class RingFlashAttnFunc(torch.autograd.Function):
    """Ring attention over a contiguous split. Subclasses may override forward alone, in xDiT's manner."""

    kind = "contiguous"

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
        attn_type=None,
        attn_processor=None,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, attn_type)
        call = options("contiguous", q, *masks)
        out, lse = _forward(ctx, call, q, k, v, group, attn_type, attn_processor)
        return (out, lse, None) if return_softmax else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *args):
        return _backward(ctx, "contiguous", dout, args[0] if args else None)


class ZigZagRingFlashAttnFunc(torch.autograd.Function):
    """Ring attention over a zigzag split."""

    kind = "zigzag"

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
        attn_type=None,
        attn_processor=None,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, attn_type)
        call = options("zigzag", q, *masks)
        out, lse = _forward(ctx, call, q, k, v, group, attn_type, attn_processor)
        return (out, lse, None) if return_softmax else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *args):
        return _backward(ctx, "zigzag", dout, args[0] if args else None)


class StripeFlashAttnFunc(torch.autograd.Function):
    """Ring attention over a striped split."""

    kind = "stripe"

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
        attn_type=None,
        attn_processor=None,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, attn_type)
        call = options("stripe", q, *masks)
        out, lse = _forward(ctx, call, q, k, v, group, attn_type, attn_processor)
        return (out, lse, None) if return_softmax else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *args):
        return _backward(ctx, "stripe", dout, args[0] if args else None)


# -- varlen ------------------------------------------------------------------------------------------------


def pad_lse(lse: Tensor, cu: list[int], longest: int) -> Tensor:
    """``[H, T] → [N, H, longest]``, a row a document."""
    out = lse.new_zeros(len(cu) - 1, lse.shape[0], longest)
    for row, a, b in zip(out, cu, cu[1:]):
        row[:, : b - a] = lse[:, a:b]
    return out


def flat_lse(lse: Tensor, cu: list[int]) -> Tensor:
    """``[H, T]`` from either form."""
    if lse.dim() == 2:
        return lse
    return torch.cat([row[:, : b - a] for row, a, b in zip(lse, cu, cu[1:])], 1)


def half_index(cu: list[int], front: bool, device: torch.device) -> slice | Tensor:
    """The first or second half of each document's local rows, as upstream keeps them for its backward."""
    if len(cu) == 2:
        return slice(None, cu[1] // 2) if front else slice(cu[1] // 2, None)
    index = torch.zeros(cu[-1], dtype=torch.bool, device=device)
    for a, b in zip(cu, cu[1:]):
        middle = (a + b) // 2
        index[a : middle if front else b] = front
        if not front:
            index[middle:b] = True
    return index


def _varlen_forward(
    ctx, call: Call, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, group, padded: bool
) -> tuple[Tensor, Tensor]:
    cu = cu_seqlens.tolist()
    x = Tensors(*(t.contiguous()[None] for t in (q, k, v)))
    out, lse, _ = core.forward(call.plan(x, group_of(group), cu=cu), x)
    out, lse = out[0], pad_lse(lse[0], cu, int(max_seqlen)) if padded else lse[0]
    halves = [half_index(cu, front, q.device) for front in (True, False)] if call.kind == "zigzag" else []
    ctx.is_half_index_tensor = bool(halves) and isinstance(halves[0], Tensor)
    if halves and not ctx.is_half_index_tensor:
        ctx.half_index0, ctx.half_index1 = halves
        halves = []
    ctx.save_for_backward(q, x.k[0], x.v[0], out, lse, cu_seqlens, *halves)
    ctx.max_seqlen = max_seqlen
    remember(ctx, call, group, None, None)
    return out, lse


def _varlen_backward(ctx, kind: str, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors[:6]
    cu, call, x = cu_seqlens.tolist(), recall(ctx, kind), Tensors(q[None], k[None], v[None])
    lse, dlse = (None if t is None else flat_lse(t, cu)[None] for t in (lse, dlse))
    saved = Saved(x, out[None], lse.to(wide(q.dtype)))
    dout = None if dout is None else dout[None]
    grads = core.backward(call.plan(x, group_of(ctx.group), cu=cu), saved, dout, dlse)
    return (grads.q[0], grads.k[0], grads.v[0], *[None] * (len(ctx.needs_input_grad) - 3))


class RingFlashAttnVarlenFunc(torch.autograd.Function):
    """Packed documents, each split contiguously over all ranks."""

    kind = "contiguous"

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None)
        call = options("contiguous", q, *masks)
        out, lse = _varlen_forward(ctx, call, q, k, v, cu_seqlens, max_seqlen, group, padded=True)
        return (out, lse, None) if return_softmax else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *args):
        return _varlen_backward(ctx, "contiguous", dout, args[0] if args else None)


class ZigZagRingFlashAttnVarlenFunc(torch.autograd.Function):
    """Packed documents, each split in zigzag over all ranks."""

    kind = "zigzag"

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_softmax,
        group,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None)
        call = options("zigzag", q, *masks)
        out, lse = _varlen_forward(ctx, call, q, k, v, cu_seqlens, max_seqlen, group, padded=True)
        return (out, lse, None) if return_softmax else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, *args):
        return _varlen_backward(ctx, "zigzag", dout, args[0] if args else None)


# -- functions ---------------------------------------------------------------------------------------------


def _dense(function: type[torch.autograd.Function], name: str) -> tuple[Callable, Callable, Callable]:
    """The plain, kvpacked and qkvpacked entry points of a Function."""

    def plain(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
        attn_type=None,
        attn_processor=None,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return function.apply(q, k, v, *masks, return_attn_probs, group, attn_type, attn_processor)

    def kvpacked(q, kv, *args, **keywords):
        return plain(q, kv[:, :, 0], kv[:, :, 1], *args, **keywords)

    def qkvpacked(qkv, *args, **keywords):
        return plain(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **keywords)

    return _named(name, plain, kvpacked, qkvpacked, "``[B, T, H, D]``")


def _varlen(function: type[torch.autograd.Function], name: str) -> tuple[Callable, Callable, Callable]:
    """The varlen entry points of a Function."""

    def plain(
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
    ):
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        return function.apply(q, k, v, cu_seqlens, max_seqlen, *masks, return_attn_probs, group)

    def kvpacked(q, kv, *args, **keywords):
        return plain(q, kv[:, 0], kv[:, 1], *args, **keywords)

    def qkvpacked(qkv, *args, **keywords):
        return plain(qkv[:, 0], qkv[:, 1], qkv[:, 2], *args, **keywords)

    return _named(name, plain, kvpacked, qkvpacked, "``[T, H, D]``")


def _named(name: str, plain: Callable, kvpacked: Callable, qkvpacked: Callable, shape: str) -> tuple:
    packing = {
        "": (plain, ""),
        "kvpacked_": (kvpacked, ", k and v in one tensor"),
        "qkvpacked_": (qkvpacked, ", packed"),
    }
    first = {"": ("q", "k", "v"), "kvpacked_": ("q", "kv"), "qkvpacked_": ("qkv",)}
    own = list(inspect.signature(plain).parameters.values())[3:]
    for infix, (f, how) in packing.items():
        tensors = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in first[infix]]
        f.__signature__ = inspect.Signature([*tensors, *own])
        f.__name__ = f.__qualname__ = f"{name}_{infix}func"
        f.__doc__ = f"yunchang's {f.__name__} over ring_la; tensors {shape}{how}."
    return plain, kvpacked, qkvpacked


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _dense(
    RingFlashAttnFunc, "ring_flash_attn"
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _dense(
    ZigZagRingFlashAttnFunc, "zigzag_ring_flash_attn"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _dense(
    StripeFlashAttnFunc, "stripe_flash_attn"
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _varlen(
    RingFlashAttnVarlenFunc, "ring_flash_attn_varlen"
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen(ZigZagRingFlashAttnVarlenFunc, "zigzag_ring_flash_attn_varlen")

RING_IMPL_DICT = {
    "basic": ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
    "strip": stripe_flash_attn_func,
    "basic_pytorch": ring_flash_attn_func,
}
RING_IMPL_QKVPACKED_DICT = {
    "basic": ring_flash_attn_qkvpacked_func,
    "zigzag": zigzag_ring_flash_attn_qkvpacked_func,
    "strip": stripe_flash_attn_qkvpacked_func,
}
KINDS = {"basic": "contiguous", "zigzag": "zigzag", "strip": "stripe", "basic_pytorch": "contiguous"}
"""The split that each ring_impl_type expects."""


def install() -> Callable[[], None]:
    """Put ring_la's functions into the installed yunchang's tables; returns what takes them out again."""
    from yunchang.hybrid import utils

    before = [(table, dict(table)) for table in (utils.RING_IMPL_DICT, utils.RING_IMPL_QKVPACKED_DICT)]
    utils.RING_IMPL_DICT.update(RING_IMPL_DICT)
    utils.RING_IMPL_QKVPACKED_DICT.update(RING_IMPL_QKVPACKED_DICT)

    def uninstall() -> None:
        for table, contents in before:
            table.clear()
            table.update(contents)

    return uninstall


# -- groups, splits and layers -----------------------------------------------------------------------------


@dataclass
class ProcessGroups:
    """The groups `set_seq_parallel_pg` has made. yunchang's layers take them from one place; so do these."""

    ULYSSES_PG: dist.ProcessGroup | None = None
    RING_PG: dist.ProcessGroup | None = None


PROCESS_GROUP = ProcessGroups()


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Make the groups of a ulysses × ring split; with `use_ulysses_low`, neighbouring ranks exchange heads."""
    degree = sp_ulysses_degree * sp_ring_degree
    if degree < 1 or world_size % degree:
        raise ArgumentError("world_size", f"a multiple of {sp_ulysses_degree} × {sp_ring_degree}", world_size)
    for first in range(0, world_size, degree):
        ranks = torch.arange(first, first + degree)
        ring_by_ulysses = ranks.view(sp_ring_degree, sp_ulysses_degree)
        if not use_ulysses_low:
            ring_by_ulysses = ranks.view(sp_ulysses_degree, sp_ring_degree).T
        for name, rows in (("ULYSSES_PG", ring_by_ulysses), ("RING_PG", ring_by_ulysses.T)):
            for members in rows.tolist():
                group = dist.new_group(members)
                if rank in members:
                    setattr(PROCESS_GROUP, name, group)


def basic_extract_local(value: Tensor, rank: int, world_size: int, *args: Any, **keywords: Any) -> Tensor:
    """This rank's part of ``value [B, T, …]``, split contiguously."""
    return value.chunk(world_size, 1)[rank].detach().clone()


def zigzag_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1, *args: Any, **keywords: Any
) -> Tensor:
    """This rank's part, split in zigzag over the ring and then over the ulysses ranks."""
    groups = _process_groups()
    ring, ulysses = dist.get_rank(groups.RING_PG), dist.get_rank(groups.ULYSSES_PG)
    chunks = value.chunk(2 * rd, dim)
    return torch.cat([chunks[ring], chunks[2 * rd - 1 - ring]], dim).chunk(ud, dim)[ulysses].contiguous()


def stripe_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, *args: Any, **keywords: Any
) -> Tensor:
    """This rank's part, every rd-th token of the ring's, then split over the ulysses ranks."""
    groups = _process_groups()
    ring, ulysses = dist.get_rank(groups.RING_PG), dist.get_rank(groups.ULYSSES_PG)
    return value[:, ring::rd].chunk(ud, 1)[ulysses].contiguous()


EXTRACT_FUNC_DICT = {
    "basic": basic_extract_local,
    "zigzag": zigzag_extract_local,
    "strip": stripe_extract_local,
    "basic_pytorch": basic_extract_local,
}


def _process_groups() -> Any:
    """Ours, or those of an installed yunchang where only that has been set up."""
    if PROCESS_GROUP.RING_PG is None and PROCESS_GROUP.ULYSSES_PG is None:
        upstream = sys.modules.get("yunchang.globals")
        if upstream is not None and upstream.PROCESS_GROUP.RING_PG is not None:
            return upstream.PROCESS_GROUP
        expected = "process groups for sequence parallelism"
        raise ArgumentError("set_seq_parallel_pg", expected, "none", "Call set_seq_parallel_pg first")
    return PROCESS_GROUP


class LongContextAttention(nn.Module):
    """Ulysses × ring attention with yunchang's interface.

    Args:
        scatter_idx, gather_idx: 2 and 1, the head and token dimensions.
        ring_impl_type: the split, a key of RING_IMPL_DICT.
        use_pack_qkv: q, k and v always travel in one message. use_sync: messages are always waited for before use.
        attn_type, attn_processor: see the module.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: object = None,
        attn_processor: nn.Module | None = None,
    ) -> None:
        super().__init__()
        _check_dims(scatter_idx, gather_idx)
        if ring_impl_type not in KINDS:
            raise ArgumentError("ring_impl_type", f"one of {', '.join(KINDS)}", repr(ring_impl_type))
        groups = _process_groups()
        self.ring_pg, self.ulysses_pg = groups.RING_PG, groups.ULYSSES_PG
        self.scatter_idx, self.gather_idx, self.kind = scatter_idx, gather_idx, KINDS[ring_impl_type]
        self.use_pack_qkv, self.use_sync = use_pack_qkv, use_sync
        self.attn_type, self.attn_processor = attn_type, attn_processor
        kernel_of(attn_type)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        *args: Any,
    ) -> Tensor:
        """Attention of this rank's tokens ``[B, T, H, D]``; as in yunchang, only the output is returned."""
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        call = options(self.kind, query, *masks, self.attn_type)
        return attend(call, Tensors(query, key, value), group_of(self.ring_pg), group_of(self.ulysses_pg))


def attend(
    call: Call,
    x: Tensors,
    ring: Group,
    ulysses: Group,
    joint_rows: Tokens | None = None,
    joint_keys: Tokens | None = None,
) -> Tensor:
    """Exchange heads over `ulysses`, walk the ring, exchange back."""
    heads = None
    if ulysses.size > 1:
        tokens = {side: [t.shape[1]] * ulysses.size for side, t in (("q", x.q), ("k", x.k))}
        split = HeadSplit(x.q.shape[2], x.k.shape[2], ulysses.size)
        heads = Heads(ulysses, split, tokens, {"q": None, "k": None})
    return sharded.attention(call.plan(x, ring, heads, joint_rows=joint_rows, joint_keys=joint_keys), x)[0]


class LongContextAttentionQKVPacked(LongContextAttention):
    """The same for ``qkv [B, T, 3, H, D]``."""

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: object = None,
    ) -> None:
        if scatter_idx != 3:
            raise UnsupportedError("scatter_idx", "3, the head dimension of qkv", scatter_idx)
        super().__init__(2, gather_idx, ring_impl_type, True, use_sync, attn_type)

    def forward(self, qkv: Tensor, *args: Any, **keywords: Any) -> Tensor:
        """Attention of this rank's tokens; the other arguments are those of LongContextAttention."""
        return super().forward(*qkv.unbind(2), *args, **keywords)


class UlyssesAttention(nn.Module):
    """Ulysses attention with yunchang's interface: each rank computes its heads of the whole sequence, alone."""

    def __init__(
        self,
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: object = None,
    ) -> None:
        super().__init__()
        _check_dims(scatter_idx, gather_idx)
        self.spg, self.scatter_idx, self.gather_idx = sequence_process_group, scatter_idx, gather_idx
        self.use_sync, self.attn_type = use_sync, attn_type
        kernel_of(attn_type)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        *args: Any,
    ) -> Tensor:
        """Attention of this rank's tokens ``[B, T, H, D]``."""
        masks = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        call = options("contiguous", query, *masks, self.attn_type)
        return attend(call, Tensors(query, key, value), Alone(), group_of(self.spg))


class Alone:
    """A ring of one rank: nothing is sent."""

    size, rank = 1, 0


def _check_dims(scatter_idx: int, gather_idx: int) -> None:
    if (scatter_idx, gather_idx) != (2, 1):
        raise UnsupportedError(
            "scatter_idx, gather_idx", "2 and 1: tensors are [B, T, H, D]", (scatter_idx, gather_idx)
        )
