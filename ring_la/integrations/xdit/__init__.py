"""xDiT over ring_la: a layer with xFuserLongContextAttention's interface (`layer`), an entry for its attention registry
(`registry`), and ours where its models call (`models`).
"""

from .layer import LongContextAttention, xFuserLongContextAttention
from .models import install
from .registry import SPARSE, TENSORS, attention_function, register

__all__ = [
    "LongContextAttention",
    "SPARSE",
    "TENSORS",
    "attention_function",
    "install",
    "register",
    "xFuserLongContextAttention",
]
