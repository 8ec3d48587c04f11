"""States of recurrences and convolutions as vLLM's layers keep them, and each tensor-parallel worker's part.

Layers are used by their attributes; vLLM itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError


@dataclass(frozen=True)
class WorkerPart:
    """Which part of its heads and channels a worker has: the `rank`-th of `size`."""

    rank: int
    size: int

    def cut(self, x: Tensor, dim: int, mine: int) -> Tensor:
        """This worker's `mine` entries of ``x`` along `dim`; where there are fewer than workers, several have the same.

        Raises:
            UnsupportedError: they cannot be shared out like that.
        """
        whole = x.shape[dim]
        if mine == whole:
            return x
        if mine * self.size == whole:
            return x.narrow(dim, self.rank * mine, mine)
        if mine and whole % mine == 0 and self.size % (whole // mine) == 0:
            return x.narrow(dim, self.rank // (self.size // (whole // mine)) * mine, mine)
        expected = f"heads and channels that {self.size} workers share evenly"
        raise UnsupportedError("tensor_parallel_size", expected, f"{mine} of {whole} on each")


def layout(layer: Any, name: str = "") -> Callable[..., list[Tensor]]:
    """How a layer with states keeps them."""
    kind = layer.mamba_type.name
    if kind not in LAYOUTS:
        raise UnsupportedError("model", f"layers out of {', '.join(LAYOUTS)}", f"{kind} {name}".strip())
    return LAYOUTS[kind]


def write_states(layer: Any, states: Mapping[tuple[str, int], Tensor], block: int, part: WorkerPart) -> None:
    """The states of a recurrence or a convolution into a block of a layer's pages.

    Raises:
        UnsupportedError: they do not have the shapes of the layer's.
    """
    for page, state in zip(layer.kv_cache, layout(layer)(layer, states, part)):
        if page[block].shape != state.shape:
            expected = f"a state {list(page[block].shape)} of {type(layer).__name__}"
            raise UnsupportedError("reader", expected, list(state.shape))
        page[block].copy_(state)


def _gated_delta(layer: Any, states: Mapping[tuple[str, int], Tensor], part: WorkerPart) -> list[Tensor]:
    """Channels of queries, keys and values; states ``[H, V, K]``, where the reader's are ``[H, K, V]``. Kimi's have as
    many channels of each."""
    if hasattr(layer, "key_dim"):
        sizes = (layer.key_dim, layer.key_dim, layer.value_dim)
    elif hasattr(layer, "projection_size"):
        sizes = (layer.projection_size,) * 3
    else:
        expected = "gated delta nets with key_dim and value_dim, or projection_size"
        raise UnsupportedError("model", expected, type(layer).__name__)
    sections = [(size, size // part.size) for size in sizes]
    conv = _convolution(layer, states["convolution", 0], sections, part)
    return [conv, part.cut(states["recurrent", 0].mT, 0, layer.kv_cache[1].shape[1])]


def _mamba2(layer: Any, states: Mapping[tuple[str, int], Tensor], part: WorkerPart) -> list[Tensor]:
    """Channels of the inputs, of B's groups and of C's, which workers share where there are too few."""
    conv, inner = states["convolution", 0], layer.intermediate_size
    groups = (conv.shape[0] - inner) // 2, layer.groups_ssm_state_size // part.size
    conv = _convolution(layer, conv, [(inner, inner // part.size), groups, groups], part)
    return [conv, part.cut(states["recurrent", 0], 0, layer.kv_cache[1].shape[1])]


def _short_convolution(layer: Any, states: Mapping[tuple[str, int], Tensor], part: WorkerPart) -> list[Tensor]:
    conv = states["convolution", 0]
    return [_convolution(layer, conv, [(conv.shape[0], conv.shape[0] // part.size)], part)]


def _mamba1(layer: Any, states: Mapping[tuple[str, int], Tensor], part: WorkerPart) -> list[Tensor]:
    """Channels, each with its states ``[D, N]``."""
    return [*_short_convolution(layer, states, part), part.cut(states["recurrent", 0], 0, layer.kv_cache[1].shape[1])]


LAYOUTS = {
    "GDN_ATTN": _gated_delta,
    "MAMBA1": _mamba1,
    "MAMBA2": _mamba2,
    "SHORT_CONV": _short_convolution,
}
"""By vLLM's name of a kind of layer: the reader's states as that layer keeps this worker's part of them."""


def _convolution(layer: Any, x: Tensor, sections: Sequence[tuple[int, int]], part: WorkerPart) -> Tensor:
    """The inputs ``x [D, W]`` of a convolution at the last tokens, as the layer keeps them; before the first there
    were zeros.

    Args:
        sections: channels that are shared out by themselves: of the model, of this worker.
    """
    if sum(whole for whole, _ in sections) != x.shape[0]:
        raise UnsupportedError("reader", f"a convolution of channels {[w for w, _ in sections]}", x.shape[0])
    split = x.split([whole for whole, _ in sections], 0)
    out = torch.cat([part.cut(section, 0, mine) for section, (_, mine) in zip(split, sections)])
    shape = layer.kv_cache[0].shape[1:]  # [W, D] or [D, W], as vLLM is told
    if out.shape[0] not in shape:
        raise UnsupportedError("reader", f"a convolution for pages {list(shape)}", f"{out.shape[0]} channels")
    width = shape[0] if shape[1] == out.shape[0] else shape[1]
    out = torch.nn.functional.pad(out, (max(0, width - out.shape[1]), 0))
    out = out[:, out.shape[1] - width :]
    return out.mT if shape[1] == out.shape[0] else out
