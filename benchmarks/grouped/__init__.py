"""Grouped GEMM on one GPU beside the other ways to do it: `bench.py` is the command ``ring-la bench grouped``."""
