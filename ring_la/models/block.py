"""One block of a `HybridLM`: a layer along the sequence, and an MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..blockwise import by_block
from ..context import ShardedLayout
from ..errors import ArgumentError
from ..kernels.tokens.products import PreNorm
from ..nn import LAYERS, Layer, LayerOutput, MixtureOfExperts, MoEOutput, RMSNorm, Routing
from ..nn.tokens import one_token, plain
from .config import HybridConfig
from .mlp import MLPS, SwiGLU


def made(argument: str, kind: Callable[..., Any], *sizes: int, **keywords: Any) -> Any:
    """A part of a model by the keywords that `argument` has for it, which are named where there are no such."""
    try:
        return kind(*sizes, **keywords)
    except TypeError as error:
        raise ArgumentError(argument, f"keywords of {kind.__name__}", f"{keywords} ({error})") from error


class ResidualBlock(nn.Module):
    """One layer along the sequence and one MLP, each on a normalised residual stream."""

    def __init__(self, layer: Layer, mlp: nn.Module, dim: int, eps: float) -> None:
        super().__init__()
        self.layer, self.mlp = layer, mlp
        self.layer_norm, self.mlp_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)

    @classmethod
    def of(cls, config: HybridConfig, i: int) -> ResidualBlock:
        """The block of layer `i` of a model."""
        name, dim = config.layers[i], config.dim
        keywords = dict(config.options.get(name, {}))
        kind: Any = LAYERS[name]  # each takes its own keywords
        if kind.knows_depth:
            keywords = {"layer_idx": i, "num_layers": len(config.layers)} | keywords
        layer = made(f"options[{name!r}]", kind, dim, config.num_heads, **keywords)
        hidden = 32 * -(-8 * dim // (3 * 32)) if config.mlp_dim is None else config.mlp_dim
        mlp = made("mlp_options", MLPS[config.mlp], dim, hidden, **config.mlp_options)
        return cls(layer, mlp, dim, config.norm_eps)

    def forward(
        self, x: Tensor, *, output_routing: bool = False, layout: ShardedLayout | None = None, **keywords: Any
    ) -> tuple[Tensor, Any, Routing | None, Tensor | None]:
        """``x``, what the layer remembers, what the router of a mixture of experts did, and the layer's own loss."""
        step = one_token(x, layout, **keywords) and plain(self.layer_norm, RMSNorm) and plain(self.mlp_norm, RMSNorm)
        y = self.layer.token(x, _norm(self.layer_norm), keywords["state"]) if step else None
        if y is None:
            o, state, loss = self.mix_tokens(x, layout=layout, **keywords)
            y = x + o
        else:
            state, loss = keywords["state"], None
        out = self.mlp.token(y, _norm(self.mlp_norm)) if step and isinstance(self.mlp, SwiGLU) else None
        if out is not None:
            return out, state, None, loss
        o, routing = self.mix_channels(y, output_routing=output_routing, layout=layout)
        return y + o, state, routing, loss

    def mix_tokens(self, x: Tensor, **keywords: Any) -> LayerOutput:
        """What the layer adds to ``x [B, T, D]``, and what it remembers."""
        return self.layer(by_block(self.layer_norm, x, layout=keywords.get("layout")), **keywords)

    def mix_channels(self, x: Tensor, **keywords: Any) -> MoEOutput:
        """What the MLP adds to ``x [B, T, D]``, and what its router did if it has one."""
        layout = keywords.get("layout")
        y = by_block(self.mlp_norm, x, layout=layout)
        if not isinstance(self.mlp, MixtureOfExperts):
            return MoEOutput(self.mlp(y, layout=layout), None)
        return self.mlp(y, **keywords)


def _norm(norm: RMSNorm) -> PreNorm:
    return PreNorm(norm.weight, norm.eps)
