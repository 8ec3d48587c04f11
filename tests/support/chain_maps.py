"""Maps of the links of a chain, and the states that enter them one after the other."""

from __future__ import annotations

import torch

from ring_la.algebra import Affine, transition_shape
from ring_la.scan import Chain

SHAPE = (1, 3, 40, 6)


def maps(chain: Chain, kind: str, shape: tuple[int, ...] = SHAPE, device: str = "cpu") -> list[Affine]:
    """A map for each link, the same on every rank; the second head forgets within every other link."""
    rng = torch.Generator(device).manual_seed(3)
    out = []
    for i, passes in enumerate(chain.passes):
        b = torch.randn(shape, generator=rng, device=device)
        size = transition_shape(kind, b.shape)
        A = None if size is None or not passes else torch.rand(size, generator=rng, device=device) / shape[-2]
        if A is not None and i % 2:
            A[:, 1] = 1e-20
        out.append(Affine(kind, A, b))
    return out


def serial(chain: Chain, links: list[Affine]) -> list[torch.Tensor | None]:
    """The state entering each link, one after the other."""
    entering, left = [], None
    for needs, passes, m in zip(chain.needs, chain.passes, links):
        entering.append(left if needs else None)
        left = m(left) if needs and passes else m.b
    return entering
