"""``python -m ring_la`` is ``ring-la``: under torchrun, ``torchrun --nproc_per_node 4 -m ring_la bench scan``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
