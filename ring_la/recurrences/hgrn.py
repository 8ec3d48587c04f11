"""HGRN: a gated sum of each channel by itself. Every channel is a head whose key and value are one number wide."""

from __future__ import annotations

from torch import Tensor

from ..algebra import Rule
from ..kernels import Inputs
from ..outputs import LinearAttentionOutput
from .arguments import Argument
from .definition import CommonOptions, Recurrence
from .recurrence import recurrence

GATED_SUM = Rule("sum", "scalar")


@recurrence(paper="HGRN's, with channels as heads")
def _channels(x: Tensor, g: Tensor) -> Recurrence:
    """S ← e^g S + x of heads one number wide. Nobody reads q and k: part of x stands for them."""
    token = (x.detach() if x.requires_grad else x)[:, :, :1]
    return Recurrence(GATED_SUM, Inputs(token, token, x, g), names={"q": "x", "k": "x", "v": "x"})


def token(S: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One token of HGRN."""
    S = g.exp() * S + x
    return S, S


@recurrence(
    paper="Qin et al. 2023, arXiv 2311.04823, eq. 4",
    equation="S ← e^g ⊙ S + x",
    arguments=dict(x=Argument("BTD", "value"), g=Argument("BTD", "log decay")),
    token=token,
    default_scale=1.0,
    states=("D",),
    sizes=dict(D=7),
    same_bits=True,
)
def hgrn(x: Tensor, g: Tensor, *, options: CommonOptions) -> LinearAttentionOutput:
    """HGRN: S ← e^g ⊙ S + x, o = scale · S, every channel by itself. The paper's x is ``(1 − e^g) ⊙ input``.

    Args:
        x: ``[B, T, D]``. g: log forget gate ``[B, T, D]``, ≤ 0.
    """
    initial = options.initial_state
    initial = None if initial is None else initial[..., None, None]
    o, S = _channels(
        x.unsqueeze(3), g, scale=options.scale, initial_state=initial,
        output_final_state=options.output_final_state, **options.scan,
    )  # fmt: skip
    return LinearAttentionOutput(o.squeeze(3), None if S is None else S[..., 0, 0])
