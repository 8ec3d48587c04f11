"""``python -m benchmarks.scan`` is ``ring-la bench scan``."""

import sys

from ring_la.cli.main import main

sys.exit(main(["bench", "scan", *sys.argv[1:]]))
