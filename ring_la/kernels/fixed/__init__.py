"""Kernels of which a row's or a block's bits depend on nothing but its own numbers: one launch for any number of them.

    product        y = x W, a row's bits whatever rows there are
    weight         Σ dyᵀ x over blocks of tokens, added exactly
    column_sum     Σ over rows on a grid, added exactly
    norm           RMS norm and its gradients, a row a program
    attention      softmax attention, far blocks at fixed places of their documents

Tiles are fixed by the widths of tensors, never by how many rows there are; no product is split along its sum.
"""
