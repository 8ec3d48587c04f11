"""Triton bodies of the linear recurrences, and of the steps around them.

Importing this package does not import Triton: `ring_la.kernels.triton.local` does.

    tiles.py       loads, spans and small device helpers
    hopper.py      the same for the kernels in Gluon
    cut.py         pieces into segments and chunks, on the device and without a host synchronisation
    launch.py      launching again what was compiled
    table.py       block sizes
    gates.py       cumulative gates of a chunk
    horizon.py     which chunks a segment's end has forgotten
    prefix.py      the scan over segments
    additive.py    additive writes with a scalar decay or none: one fused pass, used four times
    additive_writes.py   dk and dv of those without a decay by token, in one pass
    additive_states.py, additive_gradient.py   the chunks' states; the gradients of all chunks at once, from them
    additive_gradient_hopper.py   the same in Gluon, for Hopper
    additive_gate.py   a decay's gradient where one program does not hold a state
    intra.py       what a chunk computes without its state: decayed products and the triangular inverse
    forward.py     the pass that carries the state of every other rule
    backward.py    the pass that carries its gradient
    gradient.py    a chunk's gradients, from the states around it, for a decay per key channel
    delta_gradient.py  the same for a scalar decay or none
    delta_gradient_hopper.py   the same in Gluon, for Hopper
    dplr.py        diagonal plus low rank: its chunks' products and gradients
    base.py, simple.py, general.py   the launches, by what they share
    local.py       the `Local` protocol over them
    replay.py, recorder.py, tape.py   what is used: the same, written down once for a signature and done again
    again.py       the same for functions of one step
    decode.py      one token a sequence
    conv.py, conv_kernels.py, norm.py, rms.py, decay.py, discretise.py, skip.py, swiglu.py, cross_entropy.py, read.py
                   a step each of what stands around a recurrence; strided.py: their inputs as they lie
"""
