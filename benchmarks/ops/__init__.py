"""Every operator on one GPU beside its peers: `bench.py` is the command ``ring-la bench ops``."""
