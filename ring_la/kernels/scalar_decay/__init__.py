"""Additive writes under a scalar decay or none, in Triton."""
