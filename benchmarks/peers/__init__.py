"""Other libraries, as benchmarks call them: one file a benchmark, and what they need to run here."""
