"""What the layers have in common: one way to call them, what they remember of their documents, and the checks.

    out = layer(x, layout=layout)                                    o [B, T, D], in x's split
    out = layer(x, layout=layout, output_state=True)                 and what the layer remembers, on every rank
    out = layer(next, state=out.state, output_state=True)            go on from there, e.g. token by token

A state has one row a document, N of them: the rows of a batch, or the packed documents. Documents prefilled packed
are therefore decoded as a batch of N rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..autograd import outside_graphs
from ..blockwise import by_block, fixed
from ..checks import check_flag, check_int, check_split, is_floats, is_int
from ..choices import Mode, RecurrenceBackend
from ..context import ShardedLayout
from ..errors import ArgumentError, Facts, RingLAError, UnsupportedError, describe_tensor
from ..kernels.tokens.products import PreNorm


class LayerState(NamedTuple):
    """What a recurrent layer remembers of each document; fields a layer has no use for are None."""

    recurrent: Tensor | None = None
    """State of the recurrence, ``[N, H, K, V]``."""
    tail: Tensor | None = None
    """Last inputs of the short convolution ``[N, D, W−1]``, or last token of a token shift ``[N, D]``."""
    length: Tensor | None = None
    """Tokens seen, int64 ``[N]``, where positions matter."""


class LayerOutput(NamedTuple):
    """The result of a layer."""

    o: Tensor
    """Outputs, in the shape of the input ``[B, T, D]``."""
    state: Any
    """What the layer remembers, on every rank: a `LayerState` or a `KVCache`; None unless ``output_state``."""
    loss: Tensor | None = None
    """What the layer adds to a training loss, this rank's part; None unless ``output_loss`` and the layer has one."""


@dataclass(frozen=True)
class LayerCall:
    """How the tokens of one call are split, whether its state is wanted, and whether it replaces the one given; and
    whether the layer's own loss is."""

    layout: ShardedLayout | None
    cu_seqlens: Tensor | None
    output_state: bool
    in_place: bool = False
    output_loss: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """The same for an operator."""
        return {
            "layout": self.layout,
            "cu_seqlens": self.cu_seqlens,
            "output_final_state": self.output_state,
            "in_place": self.in_place,
        }

    def rows(self, fn: Callable[..., Any], *x: Tensor, shared: Sequence[Tensor | None] = ()) -> Any:
        """``fn(*x, *shared)``, which maps each token by itself; see `blockwise.by_block`."""
        return by_block(fn, *x, layout=self.layout, shared=shared)

    def of_parameters(self, fn: Callable[..., Tensor], *x: Tensor) -> Tensor:
        """``fn(*x)`` of parameters alone: under a deterministic layout outside of a compiler's graphs, whose functions
        differ from PyTorch's in last bits."""
        return _uncompiled(fn, *x) if fixed(self.layout) else fn(*x)

    @property
    def packed(self) -> bool:
        """Whether documents are packed into one batch row."""
        return self.cu_seqlens is not None if self.layout is None else self.layout.packed


@outside_graphs
def _uncompiled(fn: Callable[..., Tensor], *x: Tensor) -> Tensor:
    return fn(*x)


class Layer(nn.Module, ABC):
    """A layer along the sequence. Subclasses give `mix`.

    Args:
        dim: channels D of the input and the output.
    """

    knows_depth: ClassVar[bool] = False
    """Whether the constructor takes ``layer_idx`` and ``num_layers``."""
    needs_runs: ClassVar[bool] = True
    """Whether each rank must own runs of consecutive tokens."""
    state_type: ClassVar[type] = LayerState
    host_steps: ClassVar[bool] = False
    """Whether a token after others waits for the host to read its state, or goes by lengths that the host knows, which
    no CUDA graph can."""
    same_bits: ClassVar[bool] = False
    """Whether all of `mix` between operators goes through `LayerCall.rows`, so that under a deterministic layout bits
    do not depend on the split; else such a layout is refused. A class with a `mix` of its own says so again."""
    state_shape: tuple[int, ...] | None = None
    """Of a document's part of `LayerState.recurrent`, in a layer that takes it apart; None: the recurrence looks."""
    cuts: ClassVar[str] = ""
    """Why no state can be gone on from with the same bits under a deterministic layout, which is then refused."""
    mode: Mode
    """Of the recurrence, in layers that have one; so is `backend`."""
    backend: RecurrenceBackend | None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "mix" in vars(cls) and "same_bits" not in vars(cls):
            cls.same_bits = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = positive("dim", dim)

    def forward(
        self,
        x: Tensor,
        *,
        state: Any = None,
        output_state: bool = False,
        layout: ShardedLayout | None = None,
        cu_seqlens: Tensor | None = None,
        in_place: bool = False,
        output_loss: bool = False,
    ) -> LayerOutput:
        """The layer over each document of `x`.

        Args:
            x: ``[B, T, D]``; under a layout T is this rank's length.
            state: what the layer remembers of each document's earlier tokens; None: nothing.
            output_state: also return what it remembers now, on every rank.
            layout: how the sequence is split over ranks. Collective: every rank calls, forward and backward.
            cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device.
            in_place: write what it remembers now over `state`, where that is of a fixed size (keys and values grow).
                For decoding: one device, no gradients.
            output_loss: also return what the layer adds to a training loss, where it has such a thing.

        Raises:
            ArgumentError: a wrong shape, dtype, layout or state, by name; under a layout on every rank.
            UnsupportedError: a deterministic layout where the layer has not the same bits on it (`same_bits`).
        """
        call = LayerCall(layout, cu_seqlens, output_state, in_place, output_loss)
        self.check(x, state, call)
        if in_place and state is None:  # there is nothing to write over
            call = LayerCall(layout, cu_seqlens, output_state, output_loss=output_loss)
        return self.mix(x, state, call)

    if TYPE_CHECKING:
        # spelled out: to pyright an assignment here has the type that nn.Module declares
        def __call__(
            self,
            x: Tensor,
            *,
            state: Any = None,
            output_state: bool = False,
            layout: ShardedLayout | None = None,
            cu_seqlens: Tensor | None = None,
            in_place: bool = False,
            output_loss: bool = False,
        ) -> LayerOutput: ...

    @abstractmethod
    def mix(self, x: Tensor, state: Any, call: LayerCall) -> LayerOutput:
        """The layer itself, over checked arguments."""

    def token(self, x: Tensor, norm: PreNorm, state: Any) -> Tensor | None:
        """``x [N, 1, D]`` and what the layer adds to it, its input through `norm`, for one token more of each sequence;
        the state is written over. None: this layer, or one with such parts, has no way in few launches."""
        return None

    # -- checks --------------------------------------------------------------------------------------------

    def check(self, x: Tensor, state: Any, call: LayerCall) -> None:
        """Refuse what does not fit this layer, on every rank alike."""
        error, layout = None, call.layout
        try:
            self._check(x, state, call)
            check_flag("output_state", call.output_state)
            check_flag("in_place", call.in_place)
            check_flag("output_loss", call.output_loss)
        except RingLAError as e:
            error = e
        if isinstance(layout, ShardedLayout) and not torch.compiler.is_compiling():
            signature = None
            if error is None:
                signature = (
                    ("x", Facts.of(x, 1)),
                    ("state given", state is not None),
                    ("output_state", call.output_state),
                    ("output_loss", call.output_loss),
                    ("gradients", torch.is_grad_enabled()),
                )
            layout.agree(f"nn.{type(self).__name__}", signature, error)
        elif error is not None:
            raise error

    def _check(self, x: Tensor, state: Any, call: LayerCall) -> None:
        name, layout = type(self).__name__, call.layout
        if not is_floats(x, 3):
            got = f"{x.dtype} of {x.dim()} dimensions" if isinstance(x, Tensor) else describe_tensor(x)
            raise ArgumentError("x", f"a float tensor [B, T, {self.dim}] for {name}", got)
        if x.shape[2] != self.dim:
            raise ArgumentError("x", f"{self.dim} channels last, the dim of this {name}", x.shape[2])
        documents = x.shape[0]
        if self.needs_runs or not isinstance(layout, ShardedLayout) or layout.has_runs:
            documents = check_split(x.shape[1], x.shape[0], layout, call.cu_seqlens, x.device)
        else:
            layout.require_local("x", x.shape[1])
        if fixed(layout) and not self.same_bits:
            raise UnsupportedError("layout", f"one without deterministic=True for {name}", "a deterministic one")
        if state is not None and self.cuts and fixed(layout):
            raise UnsupportedError("state", f"None under a deterministic layout for {name}", "a state", self.cuts)
        if state is not None and not isinstance(state, self.state_type):
            raise ArgumentError("state", f"a {self.state_type.__name__} or None for {name}", type(state).__name__)
        if isinstance(state, LayerState):
            self._check_state(state, documents)

    def _check_state(self, state: LayerState, documents: int) -> None:
        """Refuse what another layer remembers, or of other documents, as far as the operators do not."""
        S, seen, shape = state.recurrent, state.length, self.state_shape
        if shape is not None and not (is_floats(S) and S.shape == (documents, *shape)):
            expected = f"what {type(self).__name__} remembers of {documents} documents, {[documents, *shape]}"
            raise ArgumentError("state", expected, describe_tensor(S))
        if seen is not None and not (isinstance(seen, Tensor) and seen.shape == (documents,)):
            raise ArgumentError("state", f"the lengths of {documents} documents", describe_tensor(seen))


def positive(name: str, value: int) -> int:
    """The value, where it is an int of at least 1."""
    check_int(name, value, 1)
    return value


def divide(name: str, value: int, heads: int) -> int:
    """``value // heads``, where it divides."""
    if not is_int(heads, 1) or value % heads:
        raise ArgumentError(name, f"a divisor of {value}", describe_tensor(heads))
    return value // heads


def head_width(dim: int, num_heads: int, head_dim: int | None) -> int:
    """Channels of each head: `head_dim`, or for None the heads' share of `dim`."""
    if head_dim is None:
        return divide("num_heads", dim, num_heads)
    positive("num_heads", num_heads)
    return positive("head_dim", head_dim)


def merge_heads(o: Tensor) -> Tensor:
    """Heads side by side, ``[…, H, V]`` as ``[…, H·V]``."""
    return rearrange(o, "... h d -> ... (h d)")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[…, H·V]`` as ``[…, H, V]``."""
    return rearrange(x, "... (h d) -> ... h d", h=heads)


def wide(x: Tensor) -> Tensor:
    """The tensor in fp32, or in fp64 if it is: what gates are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def inverse_softplus(y: Tensor) -> Tensor:
    """The x with ``softplus(x) = y``."""
    return y + torch.log(-torch.expm1(-y))


def positions(x: Tensor, seen: Tensor | None, call: LayerCall) -> Tensor:
    """Position of each token in its document, int64 ``[T]``, or ``[B, T]`` after `seen` ``[N]`` tokens."""
    T = x.shape[1]
    if call.layout is not None:
        here, document = call.layout.positions, call.layout.documents if call.packed else None
    else:
        here, document = torch.arange(T, device=x.device), None
        if call.cu_seqlens is not None:
            cu = call.cu_seqlens.long()
            document = torch.searchsorted(cu[1:], here, right=True)
            here = here - cu[document]
    if seen is None:
        return here
    return here + seen[document] if document is not None else here + seen[:, None]


def last_tokens(x: Tensor, layout: ShardedLayout | None, cu_seqlens: Tensor | None) -> Tensor:
    """``x [B, T, D]`` at each document's last token, ``[N, D]``, on every rank. Collective under a layout."""
    if layout is None:
        return x[:, -1] if cu_seqlens is None else x[0, cu_seqlens.long()[1:] - 1]
    owners, index = layout.owners_of(torch.tensor(layout.cu_seqlens[1:], device="cpu") - 1)
    rows = x.new_zeros(x.shape[0], layout.num_documents, x.shape[2])
    mine = (owners == layout.rank).nonzero().flatten()
    rows[:, mine.to(x.device)] = x[:, index[mine].to(x.device)]
    rows = layout.cp.comm.all_reduce(rows).wait()
    return rows[0] if layout.packed else rows[:, 0]


def lengths(x: Tensor, seen: Tensor | None, call: LayerCall) -> Tensor:
    """Tokens of each document so far, int64 ``[N]``."""
    if call.layout is not None:
        cu = torch.tensor(call.layout.cu_seqlens, device=x.device)
        new = cu.diff() if call.packed else cu[-1:].expand(x.shape[0])
    elif call.cu_seqlens is not None:
        new = call.cu_seqlens.long().diff()
    else:
        new = torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
    return new if seen is None else seen + new
