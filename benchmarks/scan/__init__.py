"""Linear recurrences on a split sequence: `bench.py` is the command ``ring-la bench scan``."""
