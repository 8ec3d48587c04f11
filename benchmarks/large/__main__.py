"""``python -m benchmarks.grouped`` is ``ring-la bench grouped``."""

import sys

from ring_la.cli.main import main

sys.exit(main(["bench", "grouped", *sys.argv[1:]]))
