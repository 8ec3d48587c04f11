"""Gated sums of single channels, S ← e^g S + x: the rule "sum". Run in Triton's interpreter, not yet on a GPU."""
