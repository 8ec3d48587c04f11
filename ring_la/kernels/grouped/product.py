"""One grouped product to be computed, and the layouts the backends ask of its operands.

rows     C[r] = A[r] · B[group of r]                        A [M, K], B [G, K, N] → C [M, N]
outer    C[g] = Σ over the rows r of group g of A[r]ᵀ D[r]  A [M, K], D [M, N]    → C [G, K, N]
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Product = Literal["rows", "outer"]


class GroupedProduct(NamedTuple):
    """A product and its operands. Rows past the sum of the sizes belong to no group."""

    product: Product
    x: Tensor  # A [M, K]
    y: Tensor  # B [G, K, N] of a rows product, D [M, N] of an outer product
    sizes: Tensor  # [G], int32 or int64, on the device of x (or on the CPU, for a backend that reads them there)

    @property
    def groups(self) -> int:
        return self.sizes.shape[0]

    @property
    def rows_per_group(self) -> int:
        """The mean, rounded up: all the host knows of the sizes without asking the device."""
        return -(-self.x.shape[0] // max(self.groups, 1))

    def empty(self) -> Tensor:
        """An uninitialised result."""
        (m, k), n = self.x.shape, self.y.shape[-1]
        return self.x.new_empty((m, n) if self.product == "rows" else (self.groups, k, n))

    def ends(self) -> Tensor:
        """Where each group's rows end, int32 [G], on the device of x."""
        return torch.cumsum(self.sizes.to(self.x.device), 0, dtype=torch.int32)


class GroupedBackend(Protocol):
    """What every backend offers. `compute` owes zeros to rows past the sizes and to groups without rows."""

    def unsupported(self, call: GroupedProduct) -> str:
        """Why it cannot compute this product, in a few words; empty if it can."""

    def compute(self, call: GroupedProduct) -> Tensor:
        """The product, contiguous, in the dtype of x, accumulated in fp32 (in fp64 for fp64)."""


def by_rows(x: Tensor) -> Tensor:
    """`x` with rows that are contiguous and do not overlap; a copy only if it has to be one."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def by_matrices(y: Tensor) -> Tensor:
    """`y` [G, K, N] with every matrix stored by rows or by columns; a copy only if it has to be one."""
    _, k, n = y.shape
    _, sk, sn = y.stride()
    return y if (sn == 1 and sk >= n) or (sk == 1 and sn >= k) else y.contiguous()


def aligned(x: Tensor) -> bool:
    """Whether the base and every stride but the contiguous one are multiples of 16 bytes, as bulk copies ask."""
    contiguous = x.dim() - (1 if x.stride(-1) == 1 else 2)
    strides = [stride for dim, stride in enumerate(x.stride()) if dim != contiguous]
    return x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in strides)


@functools.cache
def installed(module: str) -> bool:
    """Whether a module could be imported; looked up once."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
