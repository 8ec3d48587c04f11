"""Kernels of others inside a model: their failures are told as theirs.

Transformers takes fla-core's Triton kernels wherever both are installed, on a CPU as well, where they cannot run. A
model then fails in a call that does not pass through ring_la's operators, whether it is parallelized or not.
"""

from __future__ import annotations

import torch

from ...autograd import outside_graphs
from ...errors import UnsupportedError

HINT = (
    "They need a GPU, and the model fails without ring_la, too: pip uninstall fla-core, or write"
    " sys.modules['fla'] = None before transformers is imported"
)


class told_as_theirs:
    """Turn what fla-core's kernels raise on a CPU into an error that names fla-core and says what to do.

    No generator: torch.compile refuses to run one beside the graphs of a call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @outside_graphs
    def __enter__(self) -> None:
        pass

    @outside_graphs
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and self._device.type == "cpu" and _passed_through(error, "fla"):
            got = "fla-core's Triton kernels, which Transformers takes where fla-core is installed"
            raise UnsupportedError("model", "a model that computes by PyTorch on a CPU", got, HINT) from error


def _passed_through(error: BaseException | None, package: str) -> bool:
    """Whether an error, or one it came of, was raised inside a package."""
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
                return True
            traceback = traceback.tb_next
        error = error.__cause__
    return False
