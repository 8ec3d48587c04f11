"""TTT-Linear's Triton kernels: what a mini-batch's step needs of the one before, and everything else side by side.

With x = k W + c, d the gradient of ½ |norm(x) − (v − k)|² by x, η_n the last rate of a mini-batch, and q scaled:

    W ← W − η_n kᵀ d,  c ← c − η_n Σ d                                    one after the other (`forwards`)
    z = q W + c − η (tril(q kᵀ + 1) d),  o = z + norm(z)                  chunks of mini-batches (`outputs`)

and back, dz from do, p = −η dz, and dx from dd through d:

    dd = tril(q kᵀ + 1)ᵀ p − η_n (k dW + dc)
    dW ← dW + qᵀ dz + kᵀ dx,  dc ← dc + Σ dz + Σ dx                       one after the other (`backwards`)

So the walks have little to do: two products a mini-batch each way (three back), of a model that stays in registers
(transposed, as the left operand, so that what is made of one product is the left operand of the next). They leave
d, dx and the models at the borders of chunks. Inside a chunk a model is the one at its border and sums over tokens:

    q_t W = q_t W_border − Σ η_n (q_tᵀ k_s) d_s      over s in mini-batches before that of t

with which `outputs`, `before` and `gradients` are products of 64 tokens.
"""
