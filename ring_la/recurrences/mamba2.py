"""Mamba-2, the state space dual (SSD) form."""

from __future__ import annotations

from torch import Tensor

from ..algebra import Rule
from ..blockwise import discretise_at_once
from ..checks import check_flag, is_floats
from ..context import ShardedLayout
from ..errors import ArgumentError, describe_tensor
from ..kernels import Inputs
from ..kernels.fused.discretise import Added, discretise, discretise_and_skip, step_inside
from ..kernels.fused.steps import steps
from .arguments import KEY, QUERY, VALUE, Argument
from .definition import Recurrence
from .recurrence import recurrence
from .retention import STATIC

RULE = Rule("additive", "scalar")
NAMES = {"q": "C", "k": "B", "v": "x", "g": "dt · A", "beta": "dt", "a": "D"}


def on_one_device(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
) -> Recurrence:
    """`mamba2` without a layout: x may be what tokens bring, Δ what it is written times, and D what of it passes by."""
    _check_all(x, dt, A, D, dt_bias, dt_softplus)
    if not isinstance(B, Tensor) or not step_inside(x, B, D):
        return _described(x, dt, A, B, C, D, dt_bias, dt_softplus)
    step, g, skip = steps(dt, A, dt_bias, D, softplus=dt_softplus)
    return Recurrence(RULE, Inputs(C, B, x.contiguous(), g, step, skip), names=NAMES)  # one copy for both passes


def _at_once(
    layout: ShardedLayout, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, *, dt_softplus: bool = False,
) -> Recurrence | None:  # fmt: skip
    """`mamba2`, with gradients of what tokens share summed exactly; None where no kernel can."""
    from ..kernels.fused.discretise_kernel import unsupported  # needs Triton

    if unsupported(x) or (D is not None and D.dim() > 1):
        return None
    v, g, through = discretise_at_once(x, dt, A, dt_bias, D, dt_softplus, layout)
    readout = None if D is None else lambda y: Added.apply(y, through, D.detach())
    return Recurrence(Rule("additive", "scalar"), Inputs(C, B, v, g), readout=readout)


@recurrence(
    paper="Dao & Gu 2024, arXiv 2405.21060, §6",
    equation="S ← e^(ΔA) S + B (Δx)ᵀ",
    arguments=dict(x=VALUE, dt=Argument("BTH"), A=STATIC, B=KEY, C=QUERY, D=Argument("H"), dt_bias=Argument("H")),
    default_scale=1.0,
    flags=dict(dt_softplus=True),
    at_once=_at_once,
    alone=on_one_device,
)
def mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
) -> Recurrence:
    """Mamba-2: S ← exp(Δ A) S + B (Δ x)ᵀ, y = scale · Sᵀ C + D x.

    Args:
        x: ``[B, T, H, V]``. dt: ``[B, T, H]``; Δ = dt + dt_bias, through a softplus if `dt_softplus`.
        A: ``[H]``, negative. B, C: ``[B, T, G, K]``, H a multiple of the G groups.
        D: ``[H]`` or ``[H, V]``, the skip. dt_bias: ``[H]``.

    `scale` is 1 by default, as in the paper, and does not touch D x. States: ``[N, H, K, V]``, mamba_ssm's transposed.
    """
    _check_all(x, dt, A, D, dt_bias, dt_softplus)
    return _described(x, dt, A, B, C, D, dt_bias, dt_softplus)


def _described(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None, softplus: bool
) -> Recurrence:
    if D is None:
        (v, g), readout = discretise(x, dt, A, bias, softplus=softplus), None
    else:
        v, g, readout = discretise_and_skip(x, dt, A, bias, D, softplus=softplus)
    return Recurrence(RULE, Inputs(C, B, v, g), readout=readout, names=NAMES)


def _check_all(x: object, dt: object, A: object, D: object, bias: object, softplus: object) -> None:
    if not is_floats(x, 4):
        raise ArgumentError("x", "a float tensor [B, T, H, V]", describe_tensor(x))
    batch, T, H, V = x.shape
    _check("dt", dt, [batch, T, H], x)
    _check("A", A, [H], x)
    if bias is not None:
        _check("dt_bias", bias, [H], x)
    if D is not None:
        _check("D", D, [H, V] if isinstance(D, Tensor) and D.dim() == 2 else [H], x)
    check_flag("dt_softplus", softplus)


def _check(name: str, t: object, shape: list[int], x: Tensor) -> None:
    """Refuse what is not a float tensor of this shape beside `x`."""
    if not is_floats(t) or list(t.shape) != shape:
        raise ArgumentError(name, f"a float tensor {shape}", describe_tensor(t))
    if t.device != x.device:
        raise ArgumentError(name, f"a tensor on {x.device}, where x is", t.device)
