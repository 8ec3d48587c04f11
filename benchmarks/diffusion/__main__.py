"""``python -m benchmarks.diffusion`` is ``ring-la bench diffusion``."""

import sys

from ring_la.cli.main import main

sys.exit(main(["bench", "diffusion", *sys.argv[1:]]))
