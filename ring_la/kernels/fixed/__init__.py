"""Kernels of which a row's or a block's bits depend on nothing but its own numbers: one launch for any number of them.

    product        y = x W, a row's bits whatever rows there are
    weight         Σ dyᵀ x over blocks of tokens, added exactly
    column_sum     Σ over rows on a grid, added exactly
    row_sum        Σ within each row
    conv           the short convolution, block by block
    norm           RMS norm and its gradients, a row a program

Tiles are fixed by the widths of tensors, never by how many rows there are; no product is split along its sum.
"""
