"""Imported before transformers: its models compute by their own PyTorch functions, not by fla-core's kernels.

Transformers takes fla-core's Triton kernels wherever both import, on tensors on a CPU as well, where they cannot run.
"""

import sys

sys.modules["fla"] = None  # type: ignore[assignment]
