"""`ContextParallel`: one sequence over the ranks of a group, and its layouts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..choices import LayoutKind
from . import affine_scan
from .grid_layout import GridLayout
from .ranks import ContextRanks
from .sharded import ShardedLayout


class ContextParallel(ContextRanks):
    """One sequence over the ranks of a group.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group; or, for attention="usp",
            a two-dimensional DeviceMesh with axes named "ulysses" and "ring", over all ranks of which the sequence
            is split. Creating a ContextParallel is collective over the group.
        scan: how states travel between ranks: "auto", "ring", "pipelined", "all_gather", "doubling" or
            "all_to_all". "auto" measures latency and bandwidth of the group once, here, and picks for each
            shape by a cost model. Deterministic ranks take the ring, and "auto" or "ring" alone.
        attention: how softmax attention exchanges keys and values: "auto" or one of ATTENTION.
        transport: what carries the messages: "torch" (torch.distributed's backend of the group), "symmetric" (memory of
            the GPUs of one host, mapped by all: one small kernel a message; a ring of softmax attention copies keys and
            values from their owner's memory), or "auto": "torch", but for that ring and a ring of states where GPUs
            reach each other's memory.
        head_groups: Ulysses goes through the heads in about so many groups, one after the other, so that of one group
            alone a rank has queries, keys and values of the whole sequence, and keeps none of them for the backward
            pass, where they travel once more. "auto": as many as leave every rank a key head of each group.
        deterministic: results, losses and gradients do not depend on the number of ranks, the layout or the packing,
            bit for bit (docs/users/promises.md says of what): segment borders fall on multiples of 64 tokens of each
            document, each such block is computed by itself, and sums have one order or are exact. On CPUs bits are
            those of a number of threads (``torch.set_num_threads``; torchrun sets one), which all ranks have alike.
        timeout: a timedelta or seconds. A peer that takes longer becomes a PeerError that names it; on GPUs where no
            host is behind another and a message of NCCL's is stuck, the process group's own timeout governs.
        validate: "first" waits for a comparison of shapes, dtypes, flags and layouts among ranks the first time a
            layout sees them, and of the weights of a `HybridLM` or a parallelized model that is new to the group;
            ranks that differ later get the same `DisagreementError`, without waiting;
            "always" waits in every call and also checks values (gates ≤ 0, no NaN), which synchronises;
            "never" trusts the caller.

    Raises:
        ArgumentError: naming the argument.
    """

    def layout(
        self,
        seq_len: int,
        kind: LayoutKind = "zigzag",
        cu_seqlens: Tensor | Sequence[int] | None = None,
        multiple_of: int | None = None,
        window: int | None = None,
    ) -> ShardedLayout:
        """The split of a sequence of `seq_len` tokens over this group; collective unless validate="never".

        Args:
            seq_len: tokens of the whole sequence; any number ≥ 1.
            kind: "contiguous", "zigzag", "balanced" or "striped".
            cu_seqlens: offsets ``[N+1]`` of packed documents in the whole sequence, on any device.
            multiple_of: segment borders fall on multiples of this; None: 64 if deterministic, where multiples count
                from each document's start and documents' ends are borders, too, else 1.
            window: earlier keys that attention's queries see, for "balanced"; None: all of their document.

        Raises:
            ArgumentError: a bad argument. DisagreementError: the ranks ask for different layouts.
        """
        return ShardedLayout(self, seq_len, kind, cu_seqlens, multiple_of, window)

    def grid(self, shape: Sequence[int], counts: Sequence[int] | None = None) -> GridLayout:
        """The split of a grid of tokens, an image ``(rows, columns)`` or a video ``(frames, rows, columns)``, by whole
        slices of its first axis; collective unless validate="never".

        Args:
            shape: the whole grid's size along each axis; tokens stand in row-major order.
            counts: slices of each rank, in order; None: as even as can be, the first ranks one more.

        Raises:
            ArgumentError: a bad argument. DisagreementError: the ranks ask for different layouts.
        """
        return GridLayout(self, shape, counts)

    def scan(
        self,
        A: Tensor | None,
        b: Tensor,
        layout: ShardedLayout | None = None,
        *,
        reverse: bool = False,
        exclusive: bool = False,
    ) -> Tensor:
        """The states of ``S_t = A_t S_(t-1) + b_t`` along a split sequence, with gradients; any affine recurrence.

        Args:
            A: transitions: ``[B, T, H]`` (scalars), ``[B, T, H, K]`` (diagonals), ``[B, T, H, K, K]`` (matrices) or
                None (identities), of any float dtype.
            b: what each step adds, ``[B, T, H, K, V]``.
            layout: how the T steps are split over this group's ranks, of runs of steps; every document starts from
                zero. None: all are here.
            reverse: from right to left: ``S_t = A_t S_(t+1) + b_t``.
            exclusive: the state that enters each step, not the one that leaves it.

        Returns:
            ``[B, T, H, K, V]``, fp32 (fp64 for fp64 inputs).

        Raises:
            ArgumentError, UnsupportedError: by name, under a layout on every rank. DisagreementError.
        """
        return affine_scan.scan(A, b, layout, reverse, exclusive)
