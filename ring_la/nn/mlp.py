"""The channel mixing that maps every token alike; its sparse sibling is in moe.py."""

from __future__ import annotations

from torch import Tensor, nn

from ..blockwise import by_block
from ..checks import check_int
from ..context import ShardedLayout
from ..kernels.fused.swiglu import swiglu
from ..kernels.tokens.products import PreNorm, added_product, normed_swiglu
from .tokens import plain, plain_linear


class SwiGLU(nn.Module):
    """``(SiLU(x W_g) ⊙ x W_u) W_d`` (Shazeer 2020, arXiv 2002.05202, eq. 6).

    Args:
        dim: D. hidden: inner width.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        for name, width in (("dim", dim), ("hidden", hidden)):
            check_int(name, width, 1)
        self.up_proj = nn.Linear(dim, 2 * hidden, bias=False)
        self.out_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, *, layout: ShardedLayout | None = None) -> Tensor:
        """``x [B, T, D]``. layout: where a deterministic one wants bits that do not depend on it; tokens do not mix."""
        hidden = by_block(swiglu, by_block(self.up_proj, x, layout=layout), layout=layout)
        return by_block(self.out_proj, hidden, layout=layout)

    def token(self, x: Tensor, norm: PreNorm) -> Tensor | None:
        """As `Layer.token`, of one token each ``x [N, 1, D]``."""
        if not (plain(self, SwiGLU) and plain_linear(x, self.up_proj, self.out_proj)):
            return None
        flat = x[:, 0]
        return added_product(flat, normed_swiglu(flat, norm, self.up_proj), self.out_proj)[:, None]
