"""Launching Triton kernels: once by Triton, then by addresses; whole calls recorded and replayed."""
