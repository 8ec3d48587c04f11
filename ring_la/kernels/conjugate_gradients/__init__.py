"""MesaNet's systems by conjugate gradients, a chunk of tokens a program, on one device.

    (H_t + diag λ) x_t = q_t,        H_t = Σ_{s ≤ t} e^{c_t − c_s} β_s k_s k_sᵀ

H of all tokens of a chunk times a vector each is linear attention: the state before the chunk, and the keys in it. Both
stay in shared memory while the solver goes on.
"""
