"""Softmax attention on one device and on a split sequence.

    tokens → scores, tiles → backends (one kernel a file) → strategies (one exchange a file) → core → local, sharded

A strategy moves keys and values and knows no masks; a backend computes one block and knows no ranks; between them go
`Tokens`, which say where each row stands in the whole sequence.
"""

from .attention import attention

__all__ = ["attention"]
