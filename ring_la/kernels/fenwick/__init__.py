"""Log-linear attention's Triton kernels: states in a Fenwick tree over chunks.

With chunks of a document numbered from 0, node i (1, 2, …) has the chunks ``[i − low(i), i)``, low(i) the lowest bit of
i, and is read by the chunks ``[i, i + low(i))``, under one level. So there is a node for each chunk, which reads
the nodes m, m − low(m), … and writes those at m + 1, m + 1 + low(m + 1), …: both about half the levels. A node's
state is summed up straight from its tokens, and its gradient from those that read it: T log T work that is all side by
side, and no state is ever made of others.
"""
