"""``python -m benchmarks.attention`` is ``ring-la bench attention``."""

import sys

from ring_la.cli.main import main

sys.exit(main(["bench", "attention", *sys.argv[1:]]))
