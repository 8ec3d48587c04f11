"""A token over keys where they lie: products and the kernel (interpreted without a GPU), against sums in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ring_la.keystore.columns import Columns, by_products
from tests.support.interpreter import compute_bf16, interpreted

interpreted()

from ring_la.keystore import decode_kernel  # noqa: E402

if not torch.cuda.is_available():
    compute_bf16()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "a head for all": (2, 5, 1, 70, 40, 24, 0, torch.float32),
    "two for each key": (3, 4, 2, 300, 32, 32, 0, torch.bfloat16),
    "latents": (1, 20, 1, 130, 48, 48, 16, torch.bfloat16),
}


def draw(
    N: int, H: int, heads: int, columns: int, K: int, V: int, R: int, dtype: torch.dtype
) -> tuple[Tensor, Columns]:
    rng = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(DEVICE)

    k = some(N, heads, columns + 1, K)[:, :, :columns]
    v = None if R else some(N, heads, columns + 1, V)[:, :, :columns]
    begin = torch.tensor([0, columns // 3, columns][:N], device=DEVICE)
    end = torch.tensor([columns - 7, columns, columns][:N], device=DEVICE)
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


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_every_way_is_the_sum(case: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "LEAST", 32)  # several parts, some of them empty
    q, keys = draw(*CASES[case])
    want = in_full(q, keys, 0.3, softcap)
    for way in (decode_kernel.decode_columns, by_products):
        o, lse = way(q, keys, 0.3, softcap)
        torch.testing.assert_close(o.double(), want[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), want[1], atol=2e-5, rtol=2e-5)
