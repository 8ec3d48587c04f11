"""One call in yunchang's terms: its arguments, where its tokens stand, and the plan that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import check_flag, is_finite
from ...comm import Entry, Group
from ...errors import ArgumentError, Facts, RingLAError, UnsupportedError, describe_tensor
from ...softmax.backends import Ask, choose
from ...softmax.geometry import Pair, Run, Tokens
from ...softmax.options import AttentionOptions
from ...softmax.plan import AttentionMoves
from ...softmax.strategies import AttentionJob, Heads, ring_of
from ...softmax.tensors import Tensors, check_tensors

KERNELS = {
    "fa": None,
    "torch_efficient": None,
    "torch_math": "torch",
    "torch_flash": "flash",
    "torch_cudnn": "cudnn",
    "fa3": "flash_attn_3",
}
"""The backend that each of yunchang's attn_types asks for; None: the fastest."""

NAMES = ("q", "k", "v", "joint query", "joint key", "joint value")
"""What a call's tensors are called where ranks differ in them."""

COMPARED = 256
"""As many calls a group are remembered: every step of packed training brings other offsets."""

_groups: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
_compared: WeakKeyDictionary[Group, dict[tuple | None, Entry]] = WeakKeyDictionary()


def group_of(group: dist.ProcessGroup | None) -> Group:
    """The group as ring_la uses it, made once a process group."""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", "a ProcessGroup or None", type(group).__name__)
    if group not in _groups:
        _groups[group] = Group(group, torch.distributed.constants.default_pg_timeout)
    return _groups[group]


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


class Masks(NamedTuple):
    """Upstream's arguments, by its names and in its order: attributes of ctx, and what they mean where they are left
    out."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class UpstreamCall:
    """What ctx carries under upstream's names, and what only this forward knows.

    Attributes:
        kind: of the split. masks: with a scale. seed: of dropout's mask; None: unknown (the forward was not ours).
    """

    kind: str
    masks: Masks
    attn_type: Any = None
    seed: int | None = None

    @property
    def flags(self) -> dict[str, object]:
        """What must be the same on all ranks, by name."""
        kernel = str(getattr(self.attn_type, "value", self.attn_type))
        given = {"alibi_slopes": self.masks.alibi_slopes is not None, "deterministic": bool(self.masks.deterministic)}
        return self.masks._asdict() | given | {"attn_type": kernel}

    @property
    def options(self) -> AttentionOptions:
        """The same in our terms."""
        m = self.masks
        if m.dropout_p and self.seed is None:
            raise UnsupportedError(
                "dropout_p", "0 where the forward was not ring_la's", m.dropout_p, "Its mask is lost"
            )
        scores = (m.causal, m.softmax_scale, m.softcap, m.window_size, m.alibi_slopes, m.dropout_p, self.seed)
        return AttentionOptions(*scores, backend=kernel_of(self.attn_type))

    def plan(
        self,
        x: Tensors,
        group: Group,
        heads: Heads | None = None,
        cu: list[int] | None = None,
        joint: tuple[Tokens, Tokens] | None = None,
    ) -> AttentionMoves:
        """The ring over `group`.

        Args:
            x: with `heads` the tensors before the exchange; the call's tokens are those after it.
            cu: offsets of this rank's part of each document.
            joint: where queries and joint keys stand.
        """
        options = self.options
        scores, counts = options.scores(x.q), (x.q.shape[1], x.k.shape[1])
        if heads is not None:
            counts = tuple(sum(heads.tokens[side]) for side in ("q", "k"))  # type: ignore[assignment]
            scores = scores.of_heads(heads.query_numbers(x.q.device))
        lengths = [[n] if cu is None else [b - a for a, b in zip(cu, cu[1:])] for n in counts]
        rows, keys = sides_of(self.kind, *lengths, group.size, x.q.device)  # type: ignore[arg-type, call-arg]
        facts: dict[str, Any] = dict(packed=cu is not None, repeatable=bool(self.masks.deterministic))
        ask = Ask(*x.kind, scores.beyond, scores.reach.windowed, **facts)
        job = AttentionJob(choose(ask, options.backend), scores, rows, keys, group=group)
        met = None if joint is None else Pair(*joint, scores.reach)
        sender = heads.group if heads is not None and group.size == 1 else group
        more: dict[str, Any] = dict(joint=met, heads=heads, way_back=sender.agreement.way_back)
        return AttentionMoves(job, ring_of(job), **more)


def sides_of(
    kind: str, q: list[int], k: list[int], ranks: int, device: torch.device
) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...]]:
    """The queries and the keys of each rank, which holds so many tokens of each document."""
    shifts = [ranks * (b - a) for a, b in zip(q, k)]
    rows = tuple(tokens_of(kind, q, ranks, r, device, shifts) for r in range(ranks))
    if k == q:
        return rows, rows
    return rows, tuple(tokens_of(kind, k, ranks, r, device, [0] * len(k)) for r in range(ranks))


def kernel_of(attn_type: Any) -> str | None:
    """The backend an attn_type asks for: an upstream AttnType, its value, or None."""
    name = getattr(attn_type, "value", attn_type)
    if name is None:
        return None
    if not isinstance(name, str) or name not in KERNELS:
        raise UnsupportedError(
            "attn_type", f"None or one of {', '.join(KERNELS)}", repr(name), "It has no gradient here"
        )
    return KERNELS[name]


def settled(
    groups: Sequence[Group],
    tensors: Sequence[object],
    make: Callable[[], UpstreamCall],
    packed: bool = False,
    **more: object,
) -> UpstreamCall:
    """The call that `make` returns, where it and the shapes are the same on all ranks of `groups`.

    What one rank refuses all refuse, and what ranks differ in is an error on each of them; compared the first time.

    Args:
        tensors: what the ranks bring, in the order of NAMES. packed: ``[T, H, D]`` and not ``[B, T, H, D]``.
        more: what else must be the same, by name.
    """
    call: UpstreamCall | None = None
    error: RingLAError | None = None
    signature: tuple[tuple[str, object], ...] | None = None
    try:
        if packed:
            _check_packed(tensors)
        call = make()
        facts = {name: Facts.of(t) for name, t in zip(NAMES, tensors) if isinstance(t, Tensor)}
        rest = {"device": _device(tensors), "gradients": torch.is_grad_enabled(), **more}
        signature = tuple({"kind": call.kind, **facts, **call.flags, **rest}.items())
    except RingLAError as e:
        error = e
    for group in groups:
        try:
            _compare(group, signature, error)
        except RingLAError as e:
            error = error or e
    if error is not None:
        raise error
    assert call is not None, "made, or refused above"
    return call


def refuse(groups: Sequence[Group], error: RingLAError) -> NoReturn:
    """Raise what this rank refuses before it comes to a call: the other ranks of `groups` do not wait for it."""

    def make() -> NoReturn:
        raise error

    settled(groups, (), make)
    raise error


def _device(tensors: Sequence[object]) -> str:
    """Where a call's tensors are, for ranks to compare."""
    return next(t.device.type for t in tensors if isinstance(t, Tensor))


def _check_packed(tensors: Sequence[object]) -> None:
    for name, t in zip(Tensors._fields, tensors):
        if not isinstance(t, Tensor) or t.dim() != 3:
            raise ArgumentError(name, "a tensor [T, H, D]", describe_tensor(t))


def _compare(group: Group, signature: tuple[tuple[str, object], ...] | None, error: Exception | None) -> None:
    """With the group's other ranks; a signature like one before is not waited for."""
    known = _compared.setdefault(group, {})
    if group.size == 1:
        return
    if error is None and signature in known:
        group.agreement.again(known[signature])
        return
    said = dict(signature or ()) if error is None else f"refused: {error}"
    entry = group.agreement.agree("the arguments of attention", said)
    while len(known) >= COMPARED:  # the oldest, the same on all ranks
        del known[next(iter(known))]
    known[signature] = entry


def checked(kind: str, x: Tensors, masks: Masks, attn_type: Any, probabilities: bool = False) -> UpstreamCall:
    """Upstream's arguments, checked, with a new seed where there is dropout.

    Args:
        x: the call's tensors ``[B, T, H, D]``. probabilities: upstream's return_attn_probs.
    """
    kernel_of(attn_type)
    flags = {"causal": masks.causal, "deterministic": masks.deterministic, "return_attn_probs": probabilities}
    for name, flag in flags.items():
        check_flag(name, flag)
    slopes = masks.alibi_slopes.detach() if isinstance(masks.alibi_slopes, Tensor) else masks.alibi_slopes
    check_tensors(x, "none" if x.joint_k is None else "front", slopes)
    dropout_p, softmax_scale, _, window_size, softcap, *_ = masks
    softcap = 0.0 if softcap is None else softcap
    if not is_finite(dropout_p) or not 0 <= dropout_p < 1:
        raise ArgumentError("dropout_p", "0 ≤ dropout_p < 1", dropout_p)
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(w is None or (isinstance(w, int) and not isinstance(w, bool)) for w in window_size):
        raise ArgumentError("window_size", "(left, right), two ints, −1 for no bound", window_size)
    if not is_finite(softcap) or softcap < 0:
        raise ArgumentError("softcap", "a finite number ≥ 0", softcap)
    if softmax_scale is not None and not is_finite(softmax_scale):
        raise ArgumentError("softmax_scale", "a finite number or None", softmax_scale)
    scale = x.q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    window = tuple(-1 if w is None else int(w) for w in window_size)
    masks = masks._replace(softmax_scale=scale, window_size=window, softcap=softcap)  # type: ignore[arg-type]
    return UpstreamCall(kind, masks, attn_type, int(torch.randint(2**62, (), device="cpu")) if dropout_p else 0)
