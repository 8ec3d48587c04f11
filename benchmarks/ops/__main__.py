"""``python -m benchmarks.ops`` is ``ring-la bench ops``."""

import sys

from ring_la.cli.main import main

sys.exit(main(["bench", "ops", *sys.argv[1:]]))
