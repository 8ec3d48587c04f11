"""The tutorial's recurrence beside the same written by hand around `ring_la.gla`, forward and with backward, ms.

    python -m benchmarks.own_recurrence [--tokens 8192 --heads 32 --channels 128] [--out FILE.json]

Both run the same kernels; what differs is the description, checked and run at each call. The function is the code block
of docs/users/tutorials/own_recurrence.md. The third column is a loop over tokens, of the first 64 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la

from . import ROOT
from .errors import relative_error
from .rows import machine, save
from .timing import medians, wall

PAGE = ROOT / "docs" / "users" / "tutorials" / "own_recurrence.md"
FEW = 64
"""Tokens of the loop."""


def of_the_page() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The tutorial's function, and its token."""
    names: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], names)
    return names["sink_memory"], names["token"]


def by_hand(q: Tensor, k: Tensor, v: Tensor, f: Tensor, s: Tensor, m: Tensor) -> Tensor:
    """The same without a definition."""
    return ring_la.gla(q, k, v + torch.sigmoid(s)[..., None] * m, F.logsigmoid(f)).o


def inputs(tokens: int, heads: int, channels: int, device: str) -> list[Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    normal = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    q, k = (F.normalize(normal(1, tokens, heads, channels), dim=-1) for _ in range(2))
    rest = [normal(1, tokens, heads, channels), normal(1, tokens, heads, channels) + 3, normal(1, tokens, heads)]
    return [t.requires_grad_() for t in (q, k, *rest, normal(heads, channels))]


def in_turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of each by the clock, which has what is written in Python, too."""
    return {name: round(1e3 * t, 3) for name, t in medians(calls, repeats, warm=2, clock=wall).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 8192), ("heads", 32), ("channels", 128), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    own, token = of_the_page()
    x = inputs(options.tokens, options.heads, options.channels, device)
    do = torch.randn_like(x[2])

    def loop(*x: Tensor) -> Tensor:
        S, out = x[0].new_zeros(1, *x[0].shape[2:], x[2].shape[3]), []
        for t in range(x[0].shape[1]):
            S, o = token(S, *(y[:, t] for y in x[:-1]), x[-1])
            out.append(o * x[0].shape[-1] ** -0.5)
        return torch.stack(out, 1)

    few = [t[:, :FEW].detach().requires_grad_() for t in x[:-1]] + [x[-1]]
    a, b = own(*x).o, by_hand(*x)
    c = loop(*few).detach()
    found: dict[str, Any] = {"tokens": options.tokens, "heads": options.heads, "channels": options.channels}
    found |= machine()
    found["equal"] = torch.equal(a, b)
    found["loop_error"] = relative_error(a[:, :FEW].detach(), c)
    arms = {"definition": (lambda *x: own(*x).o, x, do), "by hand": (by_hand, x, do),
            f"loop of {FEW} tokens": (loop, few, do[:, :FEW])}  # fmt: skip
    with torch.no_grad():
        forward = in_turns({n: lambda a=a: a[0](*a[1]) for n, a in arms.items()}, options.repeats)
    steps = {n: lambda a=a: torch.autograd.grad(a[0](*a[1]), a[1], a[2]) for n, a in arms.items()}
    both = in_turns(steps, options.repeats)
    for name in arms:
        found[name] = {"forward": forward[name], "forward and backward": both[name]}
        print(f"{name:20} {forward[name]:9.3f} {both[name]:9.3f}", flush=True)
    print(f"equal bits: {found['equal']}; the loop differs by {found['loop_error']:.1e}")
    save(options.out, found)


if __name__ == "__main__":
    main()
