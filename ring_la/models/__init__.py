"""Models made of `ring_la.nn` layers."""

from .hybrid import HybridConfig, HybridLM, LMOutput
from .mlp import MLPS, SwiGLU

__all__ = ["MLPS", "HybridConfig", "HybridLM", "LMOutput", "SwiGLU"]
