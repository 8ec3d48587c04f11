"""A token of some sequences over keys in columns, drawn, and what it reads in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ring_la.keystore.columns import Columns


class Shape(NamedTuple):
    """N sequences, H query heads of `heads` key heads, K and V channels, R of rotary keys beside latents."""

    N: int
    H: int
    heads: int
    columns: int
    K: int
    V: int
    R: int
    dtype: torch.dtype


def draw(shape: Shape, device: str) -> tuple[Tensor, Columns]:
    N, H, heads, columns, K, V, R, dtype = shape
    rng = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    k = some(N, heads, columns + 1, K)[:, :, :columns]
    v = None if R else some(N, heads, columns + 1, V)[:, :, :columns]
    begin = torch.tensor([0, columns // 3, columns][:N], device=device)  # the third sees nothing
    end = torch.tensor([columns - 7, columns, columns][:N], device=device)
    more = (some(N, H, R), some(N, heads, columns, R)) if R else (None, None)
    return some(N, H, K), Columns(k, v, begin, end, *more)


def in_full(q: Tensor, keys: Columns, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    o, lse = [], []
    for n in range(len(q)):
        for h in range(q.shape[1]):
            g, seen = h * keys.k.shape[1] // q.shape[1], slice(int(keys.begin[n]), int(keys.end[n]))
            k = keys.k[n, g, seen].double()
            x = k @ q[n, h].double()
            if keys.q2 is not None and keys.k2 is not None:
                x = x + keys.k2[n, g, seen].double() @ keys.q2[n, h].double()
            x = softcap * torch.tanh(x * scale / softcap) if softcap else x * scale
            v = k if keys.v is None else keys.v[n, g, seen].double()
            o.append(torch.softmax(x, 0) @ v)
            lse.append(torch.logsumexp(x, 0))
    return torch.stack(o).unflatten(0, (len(q), -1)), torch.stack(lse).unflatten(0, (len(q), -1))
