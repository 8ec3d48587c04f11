"""``python -m ring_la.cli.bench_ops`` is ``ring-la bench ops``."""

import sys

from ..main import main

sys.exit(main(["bench", "ops", *sys.argv[1:]]))
