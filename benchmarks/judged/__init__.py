"""Other projects' context parallelism under `ring_la.testing`: ``python -m benchmarks.judged [NAME …]``."""
