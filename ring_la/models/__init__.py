"""Models made of `ring_la.nn` layers."""

from .config import HybridConfig
from .hybrid import HybridLM, LMOutput
from .mlp import MLPS, SwiGLU

__all__ = ["MLPS", "HybridConfig", "HybridLM", "LMOutput", "SwiGLU"]
