"""``python -m benchmarks.large`` is ``ring-la bench large``."""

import sys

from ring_la.cli.main import main

sys.exit(main(["bench", "large", *sys.argv[1:]]))
