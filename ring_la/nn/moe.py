"""A mixture of experts over a split sequence: each token goes through the k SwiGLUs its router picks, none is dropped.

    p = softmax(x W_r)  [tokens, E],    o = Σ over the k largest of p_e · expert_e(x)  (+ a shared expert)

The router is balanced by an auxiliary loss over the N tokens of the whole sequence, all ranks' and all documents':

    balance = E · Σ_e f_e P_e,   f_e = assignments to e / (k N),   P_e = Σ_t p_te / N

(Fedus et al. 2021, arXiv 2101.03961, eq. 4–6, for k = 1; it is 1 where all experts get the same), and

    z = Σ_t logsumexp(logits_t)² / N        (Zoph et al. 2022, arXiv 2202.08906, eq. 5).

f is a count and has no gradient, and both losses are sums over tokens once f is known. So the ranks exchange nothing
but counts: with the whole sequence's f and N, a rank's part is the sum over its own tokens, the parts add up to the
loss, and their gradients to its gradient, without any exchange in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import full_precision
from ..blockwise import by_block, fixed, linear, token_sum
from ..checks import check_flag, check_int, check_least, is_floats
from ..choices import GroupedBackend
from ..comm import Pending
from ..context import ShardedLayout
from ..errors import ArgumentError, RingLAError, UnsupportedError, describe_tensor
from ..grouped_gemm import grouped_gemm
from . import fixed_experts
from .layer import positive, wide
from .mlp import SwiGLU


class Routing(NamedTuple):
    """How a router spread the tokens of the whole sequence; all but the loss are the same on every rank."""

    aux_loss: Tensor
    """This rank's part of the auxiliary loss, times its coefficients; to be added to the rank's own loss."""
    load: Tensor
    """Each expert's share of the assignments, f ``[E]``, summing to 1."""
    probability: Tensor
    """Each expert's mean probability, P ``[E]``, summing to 1."""


class MoEOutput(NamedTuple):
    """The result of a mixture of experts."""

    o: Tensor
    """Outputs, in the shape of the input ``[B, T, D]``."""
    routing: Routing | None
    """What the router did; None unless ``output_routing``."""


class MixtureOfExperts(nn.Module):
    """k of E SwiGLUs a token, as in Mixtral, Qwen-MoE and Qwen3-Next (see the module's text).

    The router multiplies and normalises in fp32 (fp64 for fp64), also inside autocast. Under a deterministic layout
    each expert reads all of a rank's tokens, zeros in place of those that are not its own, E / k times the work, and
    the first rank's part of the auxiliary loss is all of it.

    Args:
        dim: D. hidden: inner width of each expert.
        experts: E. top_k: k, experts a token.
        renormalize: the k weights of a token are divided by their sum.
        shared_hidden: inner width of an expert that every token passes; 0: none.
        shared_gate: its output is multiplied by ``sigmoid(x w)``, as Qwen does.
        balance_coef, z_coef: of the two auxiliary losses.
        backend: of the grouped GEMMs, as in `grouped_gemm`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        experts: int = 8,
        top_k: int = 2,
        renormalize: bool = True,
        shared_hidden: int = 0,
        shared_gate: bool = False,
        balance_coef: float = 0.01,
        z_coef: float = 0.0,
        backend: GroupedBackend = "auto",
    ) -> None:
        super().__init__()
        for name, width in (("dim", dim), ("hidden", hidden), ("experts", experts), ("top_k", top_k)):
            positive(name, width)
        if top_k > experts:
            raise ArgumentError("top_k", f"an int from 1 to experts = {experts}", top_k)
        check_int("shared_hidden", shared_hidden, 0)
        for name, coef in (("balance_coef", balance_coef), ("z_coef", z_coef)):
            check_least(name, coef)
        check_flag("renormalize", renormalize)
        check_flag("shared_gate", shared_gate)
        if shared_gate and not shared_hidden:
            raise ArgumentError("shared_gate", "False without a shared expert", shared_gate, "Give shared_hidden")
        self.dim, self.top_k, self.renormalize = dim, top_k, renormalize
        self.balance_coef, self.z_coef, self.backend = balance_coef, z_coef, backend
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(experts, dim, hidden, backend)
        self.shared = SwiGLU(dim, shared_hidden) if shared_hidden else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if shared_gate else None

    def forward(self, x: Tensor, *, output_routing: bool = False, layout: ShardedLayout | None = None) -> MoEOutput:
        """Every token through its experts.

        Args:
            x: ``[B, T, D]``; under a layout T is this rank's length, which may be 0.
            output_routing: also return the auxiliary loss and the router's statistics. Under a layout collective:
                one all-reduce of 2·E numbers in the forward pass, under way while the experts compute. Without it
                nothing is exchanged.
            layout: how the sequence is split over ranks.

        Raises:
            ArgumentError: a wrong shape, dtype or layout, by name; under a layout on every rank.
            UnsupportedError: a named backend of grouped GEMMs under a deterministic layout.
        """
        _check(self, x, output_routing, layout)
        if fixed(layout):
            return self._fixed(x, output_routing, layout)
        flat = x.flatten(0, 1)
        logits = self._logits(flat)
        p = logits.softmax(-1)
        weights, chosen = p.topk(self.top_k, -1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        places = Places.of(chosen, p.shape[1])
        if output_routing:
            sums = torch.stack([places.sizes.double(), p.detach().sum(0).double()])  # fp64: counts stay exact
            if layout is not None:
                pending = _post(sums, layout)
        o = places.collect(self.experts(places.spread(flat), places.sizes, places.arrange(weights)))
        if self.shared is not None:
            o = o + self._shared(flat)
        o = o.view(x.shape)
        if not output_routing:
            return MoEOutput(o, None)
        if layout is not None:
            sums = pending.wait()
        tokens = max(1, x.shape[0] * (x.shape[1] if layout is None else layout.seq_len))
        return MoEOutput(o, self._routing(logits, p, sums, tokens))

    if TYPE_CHECKING:
        # spelled out: to pyright an assignment here has the type that nn.Module declares
        def __call__(
            self, x: Tensor, *, output_routing: bool = False, layout: ShardedLayout | None = None
        ) -> MoEOutput: ...

    def _fixed(self, x: Tensor, output_routing: bool, layout: ShardedLayout) -> MoEOutput:
        """Under a deterministic layout (see `fixed_experts`)."""
        logits = self._logits(x, layout)
        routed = fixed_experts.routed(logits, self.top_k, self.renormalize, layout)
        o = fixed_experts.mixed(x, routed, self.experts.up_proj.weight, self.experts.out_proj.weight, layout)
        if self.shared is not None:
            o = o + self._shared(x, layout)
        if not output_routing:
            return MoEOutput(o, None)
        sums, tokens = fixed_experts.statistics(routed, layout), x.shape[0] * layout.seq_len
        return MoEOutput(o, self._routing(logits, routed.p, sums, tokens, layout))

    def _logits(self, x: Tensor, layout: ShardedLayout | None = None) -> Tensor:
        with full_precision(x):
            if type(self.router) is not nn.Linear:  # an adapter around it, which computes in its weights' dtype
                return wide(by_block(self.router, x, layout=layout))
            return linear(wide(x), wide(self.router.weight), layout=layout)

    def _shared(self, x: Tensor, layout: ShardedLayout | None = None) -> Tensor:
        assert self.shared is not None
        o = self.shared(x, layout=layout)
        if self.shared_gate is None:
            return o
        gate = by_block(self.shared_gate, x, layout=layout)
        return by_block(fixed_experts.gated, o, gate, layout=layout) if fixed(layout) else o * torch.sigmoid(gate)

    def _routing(
        self, logits: Tensor, p: Tensor, sums: Tensor, tokens: int, layout: ShardedLayout | None = None
    ) -> Routing:
        """From this rank's logits and probabilities, and the whole sequence's counts and sums of probabilities."""
        load, probability = (sums[0] / (self.top_k * tokens)).to(p.dtype), (sums[1] / tokens).to(p.dtype)
        losses = by_block(self._losses, logits, p, layout=layout, shared=(load,))
        return Routing(token_sum(losses, layout=layout) / tokens, load, probability)

    def _losses(self, logits: Tensor, p: Tensor, load: Tensor) -> Tensor:
        """Each token's part of both losses, times N."""
        losses = self.balance_coef * load.shape[0] * (load * p).sum(-1)
        return losses + self.z_coef * logits.logsumexp(-1).square() if self.z_coef else losses


class Experts(nn.Module):
    """E SwiGLUs over rows sorted by expert: two grouped GEMMs, gate and up side by side in the first."""

    def __init__(self, experts: int, dim: int, hidden: int, backend: GroupedBackend = "auto") -> None:
        super().__init__()
        self.up_proj = GroupedLinear(experts, dim, 2 * hidden, backend)
        self.out_proj = GroupedLinear(experts, hidden, dim, backend)

    def forward(self, x: Tensor, sizes: Tensor, weights: Tensor) -> Tensor:
        """Rows ``x [M, D]``, the first sizes[0] of them expert 0's and so on, each result times its ``weights [M]``."""
        gate, up = self.up_proj(x, sizes).chunk(2, -1)
        h = F.silu(gate) * up * weights[:, None]  # a weight commutes with the last product
        return self.out_proj(h.to(up.dtype), sizes)


class GroupedLinear(nn.Module):
    """E linear maps, ``weight [E, out, in]``, each initialised as nn.Linear does."""

    def __init__(self, experts: int, inputs: int, outputs: int, backend: GroupedBackend = "auto") -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs).uniform_(-bound, bound))
        self.backend: GroupedBackend = backend

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return grouped_gemm(x, self.weight.mT, sizes, backend=self.backend)


# -- to the experts and back -------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where the k assignments of each of N tokens stand once all are sorted by expert. Nothing is read by the host."""

    order: Tensor  # [N·k], the assignment k·n + j that stands at each place
    place: Tensor  # [N, k], the place of each assignment
    sizes: Tensor  # [E], assignments of each expert

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Places:
        """Of the experts ``chosen [N, k]``, out of so many."""
        expert, order = chosen.flatten().sort(stable=True)
        here = torch.arange(order.shape[0], device=order.device)
        place = torch.empty_like(order).scatter_(0, order, here).view(chosen.shape)
        borders = torch.searchsorted(expert, torch.arange(experts + 1, device=expert.device))
        return cls(order, place, borders.diff())

    def spread(self, x: Tensor) -> Tensor:
        """Tokens ``[N, D]`` at the places of their assignments ``[N·k, D]``."""
        return _Spread.apply(x, self.order, self.place)

    def collect(self, y: Tensor) -> Tensor:
        """The sum of each token's k rows of ``y [N·k, D]``, ``[N, D]``."""
        return _Collect.apply(y, self.order, self.place)

    def arrange(self, weights: Tensor) -> Tensor:
        """A value of each assignment ``[N, k]`` at its place ``[N·k]``."""
        return weights.flatten().index_select(0, self.order)


# Each of the two is the derivative of the other, and both only read at indices: no atomic sums, so results and
# gradients are the same in every run, and a token's k terms are added in fp32.


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order, place)
        return x.index_select(0, order // place.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Collect.apply(grad, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order, place)
        return y[place].sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Spread.apply(grad, *ctx.saved_tensors), None, None


# -- among the ranks ---------------------------------------------------------------------------------------


def _check(moe: MixtureOfExperts, x: Tensor, output_routing: bool, layout: ShardedLayout | None) -> None:
    """Refuse what does not fit, on every rank alike."""
    error, name = None, type(moe).__name__
    try:
        if not is_floats(x, 3) or x.shape[2] != moe.dim:
            raise ArgumentError("x", f"a float tensor [B, T, {moe.dim}] for {name}", describe_tensor(x))
        check_flag("output_routing", output_routing)
        if layout is not None and not isinstance(layout, ShardedLayout):
            raise ArgumentError("layout", "a layout made by ContextParallel.layout, or None", type(layout).__name__)
        if layout is not None:
            layout.require_local("x", x.shape[1])
            if fixed(layout):
                _check_fixed(moe)
    except RingLAError as e:
        error = e
    if isinstance(layout, ShardedLayout) and not torch.compiler.is_compiling():
        signature = None
        if error is None:
            signature = (("rows of x", x.shape[0]), ("dtype of x", x.dtype), ("output_routing", output_routing))
        layout.agree(f"nn.{name}", signature, error)
    elif error is not None:
        raise error


def _check_fixed(moe: MixtureOfExperts) -> None:
    """Refuse what a deterministic layout has not."""
    if moe.backend != "auto":
        hint = "There products are those of linear layers, of all tokens"
        raise UnsupportedError("backend", '"auto" under a deterministic layout', repr(moe.backend), hint)
    for part in (moe.experts.up_proj, moe.experts.out_proj):
        if type(part) is not GroupedLinear:  # an adapter around it, whose weights would be passed over
            raise UnsupportedError("layout", "one without deterministic=True for such experts", type(part).__name__)


def _post(sums: Tensor, layout: ShardedLayout) -> Pending:
    """The sum over the ranks; within a compiled graph it is there at once."""
    if torch.compiler.is_compiling():
        summed = layout.cp.sum_over_ranks(sums)
        return Pending(lambda: summed)
    return layout.cp.comm.all_reduce(sums)
