"""The keywords of a call as the caller gave them, their checks, and the scores they stand for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import wanting
from ..checks import check_flag, check_int, check_least, check_offsets, check_scale, is_finite, is_int
from ..choices import ChosenChoice, JointPlace, LatentForm
from ..context import ATTENTION, ShardedLayout
from ..errors import ArgumentError, UnsupportedError
from .backends import BACKENDS, CHOSEN, FORMS
from .merging import wide
from .scores import Scores
from .tensors import Tensors
from .wire import COMM_DTYPES


class AttentionOptions(NamedTuple):
    """The keywords of `attention` and `mla` that are neither differentiable tensors nor the layout."""

    causal: bool = True
    scale: float | None = None
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    joint: JointPlace = "none"
    kv_layout: ShardedLayout | None = None
    cu_seqlens: Tensor | None = None
    strategy: ChosenChoice | None = None
    backend: str | None = None
    form: LatentForm | None = None
    block: int = 1
    kv_comm_dtype: torch.dtype | None = None
    sums: int = 0

    def scores(self, q: Tensor) -> Scores:
        """What they make of ``q·k``; draws the seed of a dropout mask where none is given. Checked before."""
        left, right = self.window[0], 0 if self.causal else self.window[1]
        slopes, seed = self.alibi_slopes, None
        if self.dropout_p:
            if self.dropout_seed is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("dropout_seed", "an int in a captured step", None, "A graph repeats one seed")
            given = self.dropout_seed
            seed = torch.randint(2**62, (), device="cpu") if given is None else torch.tensor(given, device="cpu")
        return Scores(
            scale=q.shape[-1] ** -0.5 if self.scale is None else float(self.scale),
            softcap=float(self.softcap),
            left=None if left < 0 else int(left),
            right=None if right < 0 else int(right),
            alibi_slopes=None if slopes is None else slopes.to(wide(q.dtype)).reshape(-1, q.shape[2]),
            dropout_p=float(self.dropout_p),
            seed=seed,
            block=self.block,
            sums=self.sums,
        )


def check_options(o: AttentionOptions) -> None:
    """Refuse keywords that are out of range."""
    check_flag("causal", o.causal)
    check_scale(o.scale)
    check_least("softcap", o.softcap)
    if not isinstance(o.window, (tuple, list)) or len(o.window) != 2 or not all(is_int(w, -1) for w in o.window):
        raise ArgumentError("window", "(left, right), two ints, each −1 or more", repr(o.window))
    if not is_finite(o.dropout_p) or not 0 <= o.dropout_p < 1:
        raise ArgumentError("dropout_p", "0 ≤ dropout_p < 1", repr(o.dropout_p))
    if o.dropout_seed is not None and (not is_int(o.dropout_seed, 0) or o.dropout_seed >= 2**63):
        raise ArgumentError("dropout_seed", "None or an int from 0 to 2**63 − 1", repr(o.dropout_seed))
    if o.joint == "rear" and o.causal:
        raise UnsupportedError("joint", "'front' where causal", "'rear'", "No query sees keys after its own position")
    if o.strategy not in (None, "chosen", *ATTENTION):
        raise ArgumentError("strategy", f"None, chosen or one of {', '.join(ATTENTION)}", repr(o.strategy))
    check_comm_dtype(o.kv_comm_dtype)
    check_int("block", o.block, 1)
    if o.form not in (None, *FORMS):
        raise ArgumentError("form", f"None or one of {', '.join(FORMS)}", repr(o.form))
    if o.backend not in (None, "reference", *BACKENDS, *CHOSEN):
        raise ArgumentError("backend", f"None or one of {', '.join(BACKENDS)}, reference", repr(o.backend))


def check_comm_dtype(dtype: object) -> None:
    """Refuse what keys and values cannot travel in."""
    if dtype not in (None, *COMM_DTYPES):
        raise ArgumentError("kv_comm_dtype", f"None or one of {', '.join(map(str, COMM_DTYPES))}", repr(dtype))


def check_whole(q: Tensor, k: Tensor, o: AttentionOptions) -> None:
    """Refuse what a call on one device does not take, and offsets that do not fit its tensors."""
    for name, given in (
        ("kv_layout", o.kv_layout),
        ("strategy", o.strategy),
        ("kv_comm_dtype", o.kv_comm_dtype),
    ):
        if given is not None:
            raise ArgumentError(name, "None without a layout", repr(given))
    if o.cu_seqlens is not None:
        Tq, Tk = q.shape[1], k.shape[1]
        if Tq != Tk:
            raise ArgumentError("cu_seqlens", "None where q and k differ in length", f"lengths {Tq} and {Tk}")
        check_offsets(o.cu_seqlens, q.shape[0], Tk, q.device)


def check_split(x: Tensors, o: AttentionOptions, layout: Any) -> None:
    """Refuse layouts that do not fit the tensors or each other."""
    B, Tq, Tk = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    for name, given in (("layout", layout), ("kv_layout", o.kv_layout)):
        if given is not None and not isinstance(given, ShardedLayout):
            raise ArgumentError(name, "a layout made by ContextParallel.layout, or None", type(given).__name__)
    if o.cu_seqlens is not None:
        raise ArgumentError("cu_seqlens", "None with a layout", "offsets", "Give them to ContextParallel.layout")
    layout.require_local("q", Tq)
    keys = layout if o.kv_layout is None else o.kv_layout
    if Tk == keys.seq_len:
        keys.require_local(x.names[1], Tk)
    if Tk != keys.local_length:
        hint = "" if o.kv_layout else "Give the keys' own layout as kv_layout"
        raise ArgumentError(
            "kv_layout", f"one with {Tk} tokens on this rank, the T of {x.names[1]}", keys.local_length, hint
        )
    if keys.cp is not layout.cp:
        raise ArgumentError("kv_layout", "a layout made by the ContextParallel of `layout`", repr(o.kv_layout))
    if keys.num_documents != layout.num_documents:
        raise ArgumentError("kv_layout", f"{layout.num_documents} documents, as in layout", keys.num_documents)
    if (layout.packed or keys.packed) and B != 1:
        raise ArgumentError("layout", f"no packed documents for a batch of {B}", repr(layout), "Pack into B = 1")
    if o.kv_comm_dtype is not None and wanting(*x.differentiable):
        raise UnsupportedError(
            "kv_comm_dtype", "None where gradients are wanted", o.kv_comm_dtype, "Use torch.no_grad()"
        )
    if layout.cp.deterministic:
        _check_deterministic(x, o)
    if x.chosen is not None:
        _check_split_choice(o, layout)
    elif o.strategy == "chosen":
        raise UnsupportedError("strategy", f"one of {', '.join(ATTENTION)} where queries see all keys", "'chosen'")
    if o.backend == "reference":
        raise UnsupportedError("backend", "a kernel with a layout", "'reference'", "It runs on one device")


def _check_split_choice(o: AttentionOptions, layout: ShardedLayout) -> None:
    """Refuse what chosen keys do not go with on a split sequence."""
    if o.kv_comm_dtype is not None:
        raise UnsupportedError("kv_comm_dtype", "None where queries choose their keys", o.kv_comm_dtype)
    strategy = o.strategy or layout.cp.attention
    if strategy in ("ulysses", "usp"):
        raise UnsupportedError(
            "strategy", "ring, all_gather, chosen or auto where queries choose their keys", repr(strategy)
        )


def _check_deterministic(x: Tensors, o: AttentionOptions) -> None:
    """Refuse what has not the same bits on any number of ranks."""
    if x.chosen is not None:
        raise UnsupportedError("chosen", "None where results must not depend on the ranks", "a choice")
    if o.form == "absorbed":
        raise UnsupportedError("form", "None or 'expanded' where results must not depend on the ranks", "'absorbed'")
    for name, t in (("joint_k", x.joint_k), ("joint_v", x.joint_v)):
        if wanting(t):
            expected = "a tensor that wants no gradient, or a layout without deterministic=True"
            raise UnsupportedError(name, expected, "one that does")
