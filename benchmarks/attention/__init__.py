"""Softmax attention on a split sequence beside its peers: `bench.py` is the command ``ring-la bench attention``."""
