"""One call in yunchang's terms: its arguments, where its tokens stand, and the plan that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import is_finite
from ...comm import Group
from ...errors import ArgumentError, RingLAError, UnsupportedError, describe_tensor
from ...softmax.backends import Ask, choose
from ...softmax.checks import check_tensors
from ...softmax.core import Plan, Tensors
from ...softmax.merge import wide
from ...softmax.scores import Scores
from ...softmax.strategies import STRATEGIES, Heads, Job
from ...softmax.tokens import Run, Tokens

KERNELS = {
    "fa": None,
    "torch_efficient": None,
    "torch_math": "torch",
    "torch_flash": "flash",
    "torch_cudnn": "cudnn",
    "fa3": "flash_attn_3",
}
"""The backend that each of yunchang's attn_types asks for; None: the fastest."""

COMPARED = 256
"""As many calls a group are remembered: every step of packed training brings other offsets."""

_groups: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
_compared: WeakKeyDictionary[Group, dict[tuple, None]] = WeakKeyDictionary()


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

    @property
    def flags(self) -> tuple:
        """What must be the same on all ranks."""
        kernel = str(getattr(self.attn_type, "value", self.attn_type))
        masks = (self.dropout_p, self.scale, self.causal, self.window, self.softcap, self.alibi_slopes is not None)
        return (*masks, bool(self.deterministic), kernel)

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
        return Plan(job, STRATEGIES["copied" if group.copies else "ring"], joint_rows, joint_keys, heads)


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


def settled(
    groups: Sequence[Group], tensors: Sequence[object], make: Callable[[], Call], *more: object, packed: bool = False
) -> Call:
    """The call that `make` returns, where it and the shapes are the same on all ranks of `groups`.

    What one rank refuses all refuse, and what ranks differ in is an error on each of them; compared the first time.

    Args:
        tensors: what the ranks bring. packed: ``[T, H, D]`` and not ``[B, T, H, D]``.
        more: what else must be the same.
    """
    call = error = signature = None
    try:
        if packed:
            for name, t in zip(Tensors._fields, tensors):
                if not isinstance(t, Tensor) or t.dim() != 3:
                    raise ArgumentError(name, "a tensor [T, H, D]", describe_tensor(t))
        call = make()
        shapes = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors if t is not None]
        signature = (call.kind, *shapes, *call.flags, torch.is_grad_enabled(), *more)
    except RingLAError as e:
        error = e
    for group in groups:
        known = _compared.setdefault(group, {})
        if group.size == 1 or (error is None and signature in known):
            continue
        try:
            group.agreement.agree("the arguments of attention", signature if error is None else f"refused: {error}")
            while len(known) >= COMPARED:  # the oldest, the same on all ranks
                del known[next(iter(known))]
            known[signature] = None
        except RingLAError as e:
            error = error or e
    if error is not None:
        raise error
    return call


def options(
    kind: str,
    x: Tensors,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    attn_type: object,
) -> Call:
    """Upstream's arguments, checked, with a new seed where there is dropout.

    Args:
        x: the call's tensors ``[B, T, H, D]``, in upstream's order.
    """
    slopes = alibi_slopes.detach() if isinstance(alibi_slopes, Tensor) else alibi_slopes
    check_tensors(x, "none" if x.joint_k is None else "front", slopes)
    softcap = 0.0 if softcap is None else softcap
    if not is_finite(dropout_p) or not 0 <= dropout_p < 1:
        raise ArgumentError("dropout_p", "0 ≤ dropout_p < 1", dropout_p)
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(w is None or isinstance(w, int) for w in window_size):
        raise ArgumentError("window_size", "(left, right), two ints, −1 for no bound", window_size)
    if not is_finite(softcap) or softcap < 0:
        raise ArgumentError("softcap", "a finite number ≥ 0", softcap)
    if softmax_scale is not None and not is_finite(softmax_scale):
        raise ArgumentError("softmax_scale", "a finite number or None", softmax_scale)
    scale = x.q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    seed = int(torch.randint(2**62, ())) if dropout_p else 0
    window = tuple(-1 if w is None else int(w) for w in window_size)
    return Call(kind, dropout_p, scale, bool(causal), window, softcap, alibi_slopes, deterministic, attn_type, seed)
