"""HGRN (Qin et al. 2023, arXiv 2311.04823)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import by_element
from ..checks import check_share
from ..choices import Mode, RecurrenceBackend
from ..kernels.fused.log_decay import decay_gate
from ..recurrences import hgrn
from .layer import Layer, LayerCall, LayerOutput, LayerState, wide
from .parts import GatedRMSNorm


class HGRN(Layer):
    """HGRN with real numbers (arXiv 2311.04823; the paper's state also turns by an angle a channel).

        f = β + (1 − β) sigmoid(x W_f),   S ← f ⊙ S + (1 − f) ⊙ SiLU(x W_i),   out = (norm(S) ⊙ SiLU(x W_g)) W_O

    The state is ``[N, D, 1, 1]``: every channel is a head of its own.

    Args:
        dim: D. num_heads: of no effect; models give every layer one.
        lower_bound: β of this layer, in [0, 1); the paper lets it grow with depth.
        mode, backend: as in the recurrences.
    """

    same_bits = True

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        *,
        lower_bound: float = 0.0,
        mode: Mode = "auto",
        backend: RecurrenceBackend | None = None,
    ) -> None:
        super().__init__(dim)
        check_share("lower_bound", lower_bound)
        self.lower_bound, self.mode, self.backend = lower_bound, mode, backend
        self.state_shape = dim, 1, 1
        self.ifg_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.norm = GatedRMSNorm(dim)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, state: LayerState | None, call: LayerCall) -> LayerOutput:
        i, f, gate = call.rows(self.ifg_proj, x).chunk(3, -1)
        o, S = hgrn(
            *call.rows(self._written, i, f),
            initial_state=None if state is None or state.recurrent is None else state.recurrent[..., 0, 0],
            mode=self.mode,
            backend=self.backend,
            **call.keywords,
        )
        o = call.rows(self.out_proj, call.rows(self.norm, o, gate))
        if S is None or not call.output_state:
            return LayerOutput(o, None)
        return LayerOutput(o, state if call.in_place else LayerState(S[..., None, None]))

    @by_element
    def _written(self, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens write, and the logarithm of what they keep."""
        g = decay_gate(f, sign=-1.0)  # logsigmoid
        if self.lower_bound:
            g = torch.log(self.lower_bound + (1 - self.lower_bound) * g.exp())
        return (-torch.expm1(g) * F.silu(wide(i))).to(i.dtype), g
