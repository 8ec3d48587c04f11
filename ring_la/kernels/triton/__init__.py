"""Triton bodies of the linear recurrences.

Importing this package does not import Triton: `ring_la.kernels.triton.local` does.

    tiles.py       loads, spans and small device helpers
    cut.py         pieces into segments and chunks, on the device and without a host synchronisation
    gates.py       cumulative gates of a chunk, and the gradient that comes back through them
    prefix.py      the scan over segments
    additive.py    additive writes with a scalar decay or none: one fused pass, used four times
    intra.py       what a chunk computes without its state: decayed products and the triangular inverse
    forward.py     the pass that carries the state of every other rule
    backward.py    the pass that carries its gradient
    gradient.py    a chunk's gradients, from the states around it
    dplr.py        diagonal plus low rank: its chunks' products and gradients
    base.py, simple.py, general.py   the launches, by what they share
    local.py       the `Local` protocol over them
    decode.py      one token a sequence
"""
