"""What measures ring_la and its peers: run from a checkout, part of no installation.

Results and the commands that made them: results/README.md. Which file measures what: README.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""


def environment(**more: str) -> dict[str, str]:
    """Variables for a process that imports this package, wherever it is started; `more` of them."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path} | more


def torchrun(ranks: int, *words: str) -> list[str]:
    """The command that starts so many ranks on this host; `words`: the module that each runs, and its options."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", *words]
