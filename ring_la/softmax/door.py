"""What a call of `attention`, `mla` or `sparse_attention` goes through: checks and agreement of the ranks, then one
device or a split sequence."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import reference
from ..autograd import outside_graphs, refuse_transforms, traced, wanting
from ..blockwise import BLOCK, by_block, fixed
from ..checks import check_nan
from ..context import ShardedLayout
from ..errors import Facts, RingLAError
from ..outputs import AttentionOutput
from . import operator, split_operator
from .call import AttentionCall, KnownCalls
from .geometry.placement import WholePlacement
from .merging import wide
from .options import AttentionOptions, check_options, check_split, check_whole
from .plan import Moves
from .tensors import Tensors, check_choice, check_tensors, name_of


def attend(x: Tensors, options: AttentionOptions, layout: ShardedLayout | None) -> AttentionOutput:
    """A call of one of them, whose tensors and keywords are as the caller gave them."""
    if options.backend != "reference":
        refuse_transforms(x.named())
    if isinstance(layout, ShardedLayout):
        return _traced(x, options, layout) if torch.compiler.is_compiling() else _split(x, options, layout)
    if layout is None and not traced(*x) and options.backend != "reference":
        return AttentionOutput(*_whole(x, options)(x))
    _check(x, options, layout)
    if options.backend == "reference":
        return _reference(x, options)
    # The operator's layers take a host 0.12 of the 0.92 ms of a forward and backward (H200): for who must see one node.
    return AttentionOutput(*operator.attention(*operator.flat(x, AttentionCall.of(x, options))))


def refuse(call: str, error: RingLAError, layout: object) -> NoReturn:
    """Raise what is wrong before tensors can be looked at: under a layout on every rank."""
    if isinstance(layout, ShardedLayout):
        layout.agree(call, None, error)
    raise error


def _whole(x: Tensors, options: AttentionOptions) -> Moves:
    """The plan of a call on one device; one like before is neither checked nor planned again."""
    kind = _kind_of_call(x, options)
    if kind is None or x.q.dim() != 4 or x.k.dim() != 4:
        _check(x, options, None)
        return AttentionCall.of(x, options).plan(x)
    plans = WholePlacement.of(x.q.shape[1], x.k.shape[1], x.q.device, None).plans
    found = plans.get(kind)
    if found is None:
        _check(x, options, None)
        plans[kind] = found = AttentionCall.of(x, options).plan(x)
    return found


def _split(x: Tensors, options: AttentionOptions, layout: ShardedLayout) -> AttentionOutput:
    """On a split sequence: check, agree, run."""
    plan, x = split_plan(x, options, layout)
    return AttentionOutput(*plan(x))


def split_plan(x: Tensors, options: AttentionOptions, layout: ShardedLayout) -> tuple[Moves, Tensors]:
    """Check and agree: the plan of a call on a split sequence, and the tensors it takes. A call like one before on this
    layout waits for nobody."""
    known, kind = KnownCalls.of(layout).agreed, _kind_of_call(x, options)
    if kind is not None and layout.cp.validate != "always" and kind in known:
        plan, entry = known[kind]
        layout.again(entry)
        return plan, _written_out(x, options, layout)
    error = None
    try:
        _check(x, options, layout)
    except RingLAError as e:
        error = e
    entry = layout.agree(name_of(x), None if error else _signature(x, options), error)
    x = _written_out(x, options, layout)
    plan = AttentionCall.of(x, options, layout).plan(x)
    if kind is not None:
        known[kind] = plan, entry
    return plan, x


def _written_out(x: Tensors, options: AttentionOptions, layout: ShardedLayout) -> Tensors:
    """Latents under a deterministic layout as the keys and values that they make, block by block, so that gradients of
    what makes them are exact sums."""
    if not x.latent or not fixed(layout):
        return x
    latents, keys = (x.k[:, :, 0], x.v[:, :, 0]), options.kv_layout or layout
    if keys.has_runs or wanting(*latents, x.up_k, x.up_v):
        k, v = by_block(_keys_and_values, *latents, layout=keys, shared=(x.up_k, x.up_v))
    else:
        k, v = _in_scattered_blocks(x, keys)
    return Tensors(x.q, k, v, x.sinks)


def _in_scattered_blocks(x: Tensors, keys: ShardedLayout) -> tuple[Tensor, Tensor]:
    """The same without gradients where a rank has some rows of each block: a row does not depend on those beside it."""
    device, B = x.q.device, x.k.shape[0]
    document, position = keys.documents.to(device), keys.positions.to(device)
    block = document * (keys.seq_len // BLOCK + 1) + position // BLOCK
    up_k, up_v = x.up_k, x.up_v
    assert up_k is not None
    assert up_v is not None
    like = _keys_and_values(x.k[:, :0, 0], x.v[:, :0, 0], up_k, up_v)
    k, v = (t.new_empty(B, len(block), *t.shape[2:]) for t in like)
    for number in block.unique().tolist():
        at = (block == number).nonzero().flatten()
        slots = position[at] % BLOCK
        for b in range(B):
            latent, rotary = (t.new_zeros(1, BLOCK, t.shape[-1]) for t in (x.k, x.v))
            latent[0, slots], rotary[0, slots] = x.k[b, at, 0], x.v[b, at, 0]
            made = _keys_and_values(latent, rotary, up_k, up_v)
            k[b, at], v[b, at] = (t[0, slots] for t in made)
    return k, v


def _keys_and_values(latent: Tensor, k_rope: Tensor, up_k: Tensor, up_v: Tensor) -> tuple[Tensor, Tensor]:
    k = torch.einsum("btl,hnl->bthn", latent, up_k)
    rotated = k_rope[:, :, None].expand(-1, -1, len(up_k), -1)
    return torch.cat([k, rotated], -1), torch.einsum("btl,hvl->bthv", latent, up_v)


_outside_graphs = outside_graphs(_split)


def _traced(x: Tensors, options: AttentionOptions, layout: ShardedLayout) -> AttentionOutput:
    """A split call within a compiled graph: one node, which checks when it runs. What is refused by arguments that the
    node does not have breaks the graph, and so do blocks of latents."""
    refused = options.kv_comm_dtype is not None and wanting(*x.differentiable)
    if options.cu_seqlens is not None or refused or fixed(layout):
        return _outside_graphs(x, options, layout)
    check_options(options)
    scores = options.scores(x.q)
    return AttentionOutput(*split_operator.split_attention(*split_operator.flat(x, scores, options, layout)))


def _reference(x: Tensors, options: AttentionOptions) -> AttentionOutput:
    """The dense fp64 truth, returned in the dtypes of the other backends."""
    not_its = {"dropout_seed", "kv_layout", "strategy", "backend", "form", "kv_comm_dtype", "sums"}
    if x.latent or x.chosen is not None:
        not_its |= {"alibi_slopes", "joint"}
    if x.chosen is None:
        not_its.add("block")
    keywords = {name: value for name, value in options._asdict().items() if name not in not_its}
    if x.latent:
        choice: dict[str, Any] = {} if x.chosen is None else {"chosen": x.chosen}
        out: Any = reference.mla(x.q, x.k[:, :, 0], x.v[:, :, 0], x.up_k, x.up_v, sinks=x.sinks, **choice, **keywords)
    elif x.chosen is not None:
        del keywords["softcap"], keywords["dropout_p"]
        out = reference.sparse_attention(*x.qkv, x.chosen, sinks=x.sinks, **keywords)
    else:
        out = reference.attention(*x.qkv, sinks=x.sinks, joint_k=x.joint_k, joint_v=x.joint_v, **keywords)
    return AttentionOutput(out.o.to(x.q.dtype), out.lse.to(wide(x.q.dtype)))


def under_autocast(q: object) -> bool:
    """Whether autocast is on where a tensor is."""
    return isinstance(q, Tensor) and q.device.type != "meta" and torch.is_autocast_enabled(q.device.type)


def autocast(*tensors: Tensor | None) -> list[Any]:
    """The tensors in autocast's dtype, as PyTorch's own attention takes them; fp64 stays."""

    def cast(t: Any) -> Any:
        floats = isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return t.to(torch.get_autocast_dtype(t.device.type)) if floats else t

    return [cast(t) for t in tensors]


# -- checks and agreement ----------------------------------------------------------------------------------


def _check(x: Tensors, options: AttentionOptions, layout: Any) -> None:
    """Refuse what is wrong, by name."""
    check_tensors(x, options.joint, options.alibi_slopes)
    check_options(options)
    if layout is None:
        check_whole(x.q, x.k, options)
        return
    check_split(x, options, layout)
    if layout.cp.validate == "always":
        for name, t in x.named():
            if t is not None:
                check_nan(name, t)
        if x.chosen is not None:
            check_choice(x.chosen, options.block, (options.kv_layout or layout).seq_len)


def _kind_of_call(x: Tensors, options: AttentionOptions) -> tuple | None:
    """All that checks, agreement and plan depend on; None where that is more than shapes and flags."""
    if options.alibi_slopes is not None or options.dropout_p or options.cu_seqlens is not None:
        return None
    dense = [isinstance(t, Tensor) and t.layout is torch.strided for t in x]
    if not all(dense[:3]) or not all([found or t is None for found, t in zip(dense, x)]):
        return None
    tensors = [None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) for t in x]
    kind = (*tensors, getattr(options.kv_layout, "cp", None), torch.is_grad_enabled(), options)
    try:
        hash(kind)
    except TypeError:  # a window given as a list
        return None
    return kind


def _signature(x: Tensors, options: AttentionOptions) -> tuple[tuple[str, object], ...]:
    """What must be the same on all ranks, by name: shapes but T, dtypes, flags and who needs a gradient."""

    def of(name: str, t: Tensor | None) -> tuple[str, object]:
        if t is None:
            return name, None
        return name, Facts.of(t, 1 if name in (*x.names_by_token, "chosen") else None)

    def flag(name: str, value: object) -> tuple[str, object]:
        if isinstance(value, Tensor):
            return of(name, value)
        if isinstance(value, ShardedLayout):
            return name, value.key
        return name, tuple(value) if isinstance(value, list) else value

    tensors, flags = [of(*named) for named in x.named()], [flag(*option) for option in options._asdict().items()]
    return (*tensors, *flags, ("gradients", torch.is_grad_enabled()))
