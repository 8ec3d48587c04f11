"""The momentum delta rule's Triton kernels: what a chunk needs of the one before, and everything else side by side.

    M ← μ M + η k wᵀ,  S ← α S − β M,  w = Sᵀ p − v,  o = Sᵀ q

Over a chunk, a and m the running products of α and μ, A and D those between two tokens, a′ the one before a token:

    S_t = a_t S₀ − b_t M₀ − Σ_{r≤t} Γ_tr η_r k_r w_rᵀ,        Γ = A diag(β) D,  b = A diag(β) m

and Γ′, b′ the same up to the token before. With T = (I + (p kᵀ ⊙ Γ′) diag(η))⁻¹ and e the last token:

    w = T a′p S₀ − T b′p M₀ − T v                                         products of a chunk (`before`)
    S ← a_e S − b_e M − (Γ_e η k)ᵀ w,  M ← m_e M + (D_e η k)ᵀ w           one after the other (`walks`)
    o = a q S₀ − b q M₀ − (q kᵀ ⊙ Γ) diag(η) w                            side by side (`after`)

and back, y what w is the solution of (`dv = −dy`):

    dy = −Tᵀ (((q kᵀ ⊙ Γ) diag(η))ᵀ do + Γ_e η k dS − D_e η k dM)
    dS ← a_e dS + (a q)ᵀ do + (a′p)ᵀ dy,  dM ← m_e dM − b_e dS − (b q)ᵀ do − (b′p)ᵀ dy

S_t is read twice, by q after token t and by p before it, in the same way but for the token: one kernel has the
gradients of either.
"""
