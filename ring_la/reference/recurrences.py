"""Every linear recurrence of the public interface, as its rule and what its tokens bring.

Shapes and letters: q, k [B, T, Hk, K] and v [B, T, H, V] with H a multiple of Hk; gates g are natural logarithms ≤ 0;
g, beta, a, b have H heads, or Hk, then shared like q and k. Any float dtype goes in; float64 comes out.

All take the common keywords
    scale               multiplies the output; None means K**-0.5 (mamba2: 1)
    initial_state       [N, H, K, V], the state before each document; N is B, or len(cu_seqlens) − 1
    output_final_state  also return the state after each document, [N, H, K, V]
    use_qk_l2norm       q and k are replaced by x · rsqrt(Σ x² + 1e-6)
    cu_seqlens          [N + 1] offsets of documents packed into one batch row; documents may be empty
    layout              must be None;  backend: None or "reference";  mode: any, all are one loop here
and return `LinearAttentionOutput(o [B, T, H, V], final_state or None)`. A wrong shape, offsets that do not span T, or
a keyword the reference cannot honour raise `ArgumentError`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_la.algebra import Rule
from ring_la.errors import ArgumentError
from ring_la.reference.arguments import expect_shape
from ring_la.reference.token_loop import TokenLoop, recurrence


@recurrence
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    normalize: bool = False,
    normalizer_q: Tensor | None = None,
    normalizer_k: Tensor | None = None,
    eps: float = 1e-10,
) -> TokenLoop:
    """Linear attention (Katharopoulos et al. 2020, eq. 10–12): S ← S + k vᵀ, o = scale · Sᵀ q.

    `causal=False` is the bidirectional form: every token reads the state after its document's last token.

    `normalize=True` divides o by scale · qᵀ(Σ k) + eps. The running sum of k then rides as one more value column, so
    states are [N, H, K, V + 1]: `[..., :V]` is Σ k vᵀ and `[..., V]` is Σ k. `normalizer_q` and `normalizer_k` are the
    q and k of that denominator where they are others; they are refused here.
    """
    rule = Rule("additive", "none")
    for name, given in (("normalizer_q", normalizer_q), ("normalizer_k", normalizer_k)):
        if given is not None:
            raise ArgumentError(name, "None in the reference", "a tensor", "Call it twice: numerator and denominator")
    if not normalize:
        return TokenLoop(rule, q, k, v, causal=causal)
    with_one = torch.cat([v.double(), v.new_ones(*v.shape[:-1], 1, dtype=torch.float64)], dim=-1)
    return TokenLoop(rule, q, k, with_one, causal=causal, readout=lambda o: o[..., :-1] / (o[..., -1:] + eps))


def _static(g: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """One log decay per head, [H] or [Hk], as a gate [B, T, H or Hk]."""
    expect_shape("g", g, H=(v.shape[2], q.shape[2]))
    return g.double().expand(*v.shape[:2], -1)


@recurrence
def retention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> TokenLoop:
    """Retention (RetNet, Sun et al. 2023, eq. 6 and 8): S ← γ_h S + k vᵀ.

    `g` [H] holds log γ_h; None means the paper's γ_h = 1 − 2^(−5−h), h = 0 … H − 1.
    """
    if g is None:
        head = torch.arange(v.shape[2], dtype=torch.float64, device=v.device)
        g = torch.log1p(-(2.0 ** (-5 - head)))
    return TokenLoop(Rule("additive", "scalar"), q, k, v, _static(g, q, v))


@recurrence
def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, layer_idx: int = 0, num_layers: int = 1
) -> TokenLoop:
    """Lightning attention (Qin et al. 2024, arXiv 2401.04658): S ← λ_h S + k vᵀ.

    `g` [H] holds log λ_h; None means −(8h / H) (1 − layer_idx / num_layers), h = 0 … H − 1: the decay of the
    architecture the paper runs on (TransNormerLLM, arXiv 2307.14995), also FLA's. Head 0 does not decay. The released
    MiniMax and Ling models instead use ALiBi slopes, log λ_h = −2^(−8(h+1)/H) times a layer factor: pass them as `g`.
    """
    if not 0 <= layer_idx < num_layers:
        raise ArgumentError("layer_idx", f"0 ≤ layer_idx < num_layers = {num_layers}", layer_idx)
    if g is None:
        H = v.shape[2]
        g = -(8 / H) * (1 - layer_idx / num_layers) * torch.arange(H, dtype=torch.float64, device=v.device)
    return TokenLoop(Rule("additive", "scalar"), q, k, v, _static(g, q, v))


@recurrence
def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> TokenLoop:
    """Gated linear attention with one gate a head: S ← exp(g) S + k vᵀ. `g` [B, T, H]; None: no decay."""
    return TokenLoop(Rule("additive", "none" if g is None else "scalar"), q, k, v, g)


@recurrence
def mamba2(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
) -> TokenLoop:
    """Mamba-2 (Dao & Gu 2024, arXiv 2405.21060, the SSD recurrence): S ← exp(Δ A) S + B (Δ x)ᵀ, y = Sᵀ C + D x.

    x [B, T, H, V]; dt [B, T, H]; A [H], negative; B, C [B, T, G, K], H a multiple of the G groups; D [H] or [H, V];
    dt_bias [H]. Δ = dt + dt_bias, through a softplus if `dt_softplus`. `scale` is 1 by default and does not touch D x.
    States are [N, H, K, V], the transpose of mamba_ssm's.
    """
    expect_shape("x", x, B=None, T=None, H=None, V=None)
    batch, T, H, V = x.shape
    expect_shape("dt", dt, B=batch, T=T, H=H)
    for name, parameter in (("A", A), ("dt_bias", dt_bias)):
        if parameter is not None:
            expect_shape(name, parameter, H=H)
    delta = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    delta = F.softplus(delta) if dt_softplus else delta
    wide = x.double()
    if D is not None:
        D = (D if D.dim() == 2 else D[:, None]).double()
        expect_shape("D", D, H=H, V=(1, V))
    return TokenLoop(
        Rule("additive", "scalar"),
        q=C,
        k=B,
        v=delta[..., None] * wide,
        g=delta * A.double(),
        default_scale=1.0,
        readout=lambda o: o if D is None else o + D * wide,
        names={"q": "C", "k": "B", "v": "x"},
    )


@recurrence
def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> TokenLoop:
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635): S ← diag(exp g) S + k vᵀ. `g` [B, T, H, K]."""
    return TokenLoop(Rule("additive", "diagonal"), q, k, v, g)


@recurrence
def hgrn2(q: Tensor, g: Tensor, v: Tensor) -> TokenLoop:
    """HGRN-2 (Qin et al. 2024, arXiv 2404.07904): `gla` whose key is what the gate lets go, k = 1 − exp(g).

    `g` [B, T, Hk, K] has the heads of q.
    """
    return TokenLoop(Rule("additive", "diagonal"), q, -torch.expm1(g.double()), v, g, names={"k": "g"})


@recurrence
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> TokenLoop:
    """The delta rule (Schlag et al. 2021; Yang et al. 2024, arXiv 2406.06484): S ← (I − β k kᵀ) S + β k vᵀ.

    `beta` [B, T, H].
    """
    return TokenLoop(Rule("delta", "none"), q, k, v, beta=beta)


@recurrence
def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> TokenLoop:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464, eq. 10): S ← (I − β k kᵀ) exp(g) S + β k vᵀ.

    `g`, `beta` [B, T, H].
    """
    return TokenLoop(Rule("delta", "scalar"), q, k, v, g, beta)


@recurrence
def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lower_bound: float | None = None) -> TokenLoop:
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, eq. 1): S ← (I − β k kᵀ) diag(exp g) S + β k vᵀ.

    `g` [B, T, H, K]; `beta` [B, T, H]. A `lower_bound` of g changes nothing.
    """
    return TokenLoop(Rule("delta", "diagonal"), q, k, v, g, beta)


@recurrence
def dplr_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor) -> TokenLoop:
    """The delta rule with a diagonal-plus-low-rank transition: S ← (diag(exp g) + b aᵀ) S + k vᵀ.

    `a`, `b`, `g` [B, T, H, K]. `a` reads the state before the decay.
    """
    return TokenLoop(Rule("dplr", "diagonal"), q, k, v, g, a=a, b=b)


@recurrence
def rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, lower_bound: float | None = None
) -> TokenLoop:
    """RWKV-7 (Peng et al. 2025, arXiv 2503.14456): `dplr_delta_rule` with the receptance r as query and w as log decay.

    r, k [B, T, Hk, K]; w, a, b [B, T, H, K]; the paper's removal key κ̂ and in-context rate give a = −κ̂, b = κ̂ ⊙ rate.
    Its readout has no scale: pass `scale=1` for it, since None means K**-0.5 here as everywhere. A `lower_bound` of w
    changes nothing.
    """
    return TokenLoop(Rule("dplr", "diagonal"), r, k, v, w, a=a, b=b, names={"q": "r", "g": "w"})
