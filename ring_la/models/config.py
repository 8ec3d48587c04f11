"""What a `HybridLM` is made of, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checks import check_flag, check_least
from ..errors import ArgumentError
from ..nn import LAYERS
from ..nn.layer import positive
from .mlp import MLPS


@dataclass(frozen=True)
class HybridConfig:
    """What a `HybridLM` is made of.

    Attributes:
        vocab_size, dim: number of tokens, and channels D.
        layers: names from `ring_la.nn.LAYERS`, first to last.
        num_heads: heads of every layer.
        mlp: a name from `MLPS`. mlp_dim: its inner width (default 8/3 · D, rounded up to 32); of each expert in "moe".
        tie_embeddings: the output projection is the embedding, transposed.
        norm_eps: of the norms between the layers.
        options: further keywords of layers, by name: ``{"attention": {"num_kv_heads": 2}}``.
        mlp_options: of the MLPs: ``{"experts": 64, "top_k": 8, "shared_hidden": 512, "balance_coef": 0.01}``.
    """

    vocab_size: int
    dim: int
    layers: Sequence[str]
    num_heads: int
    mlp: str = "swiglu"
    mlp_dim: int | None = None
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mlp_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_heads"):
            positive(name, getattr(self, name))
        if self.mlp_dim is not None:
            positive("mlp_dim", self.mlp_dim)
        if not isinstance(self.layers, (list, tuple)) or not self.layers:
            raise ArgumentError("layers", "a list of at least one name", repr(self.layers))
        for argument, keywords in (("options", self.options), ("mlp_options", self.mlp_options)):
            if not isinstance(keywords, Mapping):
                raise ArgumentError(argument, "a mapping of keywords", repr(keywords))
        for name, keywords in self.options.items():
            if not isinstance(keywords, Mapping):
                raise ArgumentError("options", f"a mapping of keywords for {name!r}", repr(keywords))
        for argument, names in (("layers", self.layers), ("options", self.options)):
            for name in names:
                if not isinstance(name, str) or name not in LAYERS:
                    raise ArgumentError(argument, f"names out of {', '.join(LAYERS)}", repr(name))
        if not isinstance(self.mlp, str) or self.mlp not in MLPS:
            raise ArgumentError("mlp", f"one of {', '.join(MLPS)}", repr(self.mlp))
        check_least("norm_eps", self.norm_eps)
        check_flag("tie_embeddings", self.tie_embeddings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint; ``HybridConfig(**d)`` is the way back."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        options = {k: dict(v) for k, v in self.options.items()}
        return out | {"layers": list(self.layers), "options": options, "mlp_options": dict(self.mlp_options)}
