"""Gated sums of single channels, S ← e^g S + x: the rule "sum"."""
