"""Kernels for chosen keys on one GPU, beside those of others: `python -m benchmarks.chosen [--out FILE]`.

bf16, causal. Cases: latents of 512 + 64 (DeepSeek), 2,048 keys a query; keys of 128, 16 query heads a key head, 32
blocks of 64 (NSA); all keys, expanded from latents; blocks of 512 that are chosen in the call, 8 a query (MoBA); and
the scores of an indexer. Choices are spread over what a query may read. Each row: errors first, of o against the fp64
loop of some queries, of the gradients against those of the case's first arm; milliseconds forward, and forward +
backward; TB/s of what a call reads of keys and adds to their gradients. What cannot run says why. --limit: seconds
after which no row is begun.

    python -m benchmarks.chosen --tokens 8192 --cases latents blocks index --forms torch triton triton_sorted --limit 50

is what `ring_la.softmax.backends.triton.chosen.fastest` is set by.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ring_la
from benchmarks.options import need_gpus
from benchmarks.rows import Rows, machine, reason
from ring_la.indexers import block_index, lightning_index

from .errors import relative_error, worst_error
from .latents import L, N, R, draw
from .ops.measure import milliseconds
from .peers import chosen as peers
from .sparse import choose
from .timing import elapsed

Function = Callable[..., Tensor]
CHECKED = 64
"""Queries whose results are compared."""
SLOW = 150.0
"""Of a call of more milliseconds the first one after a warm one counts."""


class Case(NamedTuple):
    """Tensors of a case, bytes that forward and both passes move by atomics and reads (None: not counted), the truth of
    some queries (None: there is none), and arms by name. Arms in `others` do something else: no errors of them."""

    name: str
    x: list[Tensor]
    moved: tuple[int, int] | None
    truth: Function | None
    arms: dict[str, Callable[[], Function]]
    others: tuple[str, ...] = ()


def latents(T: int, H: int, S: int, forms: list[str]) -> Case:
    """Queries on latents: ours take latents and up-projections."""
    x = [t.requires_grad_() for t in draw(1, T, H, 0)]
    chosen = choose(torch.arange(T, device="cuda"), S)

    def ours(backend: Any) -> Function:
        return lambda *x: ring_la.mla(*x, chosen=chosen, backend=backend).o

    def truth(*x: Tensor) -> Tensor:
        q, latent, rotary, w_uk, w_uv = (t.double() for t in x)
        at = torch.linspace(0, T - 1, CHECKED, device="cuda").long()
        low = torch.cat([torch.einsum("thd,hdl->thl", q[0, at, :, :N], w_uk), q[0, at, :, N:]], -1)
        c = chosen[0, at, 0].long()
        k = torch.cat([latent, rotary], -1)[0, c.clamp(min=0)]
        s = (low @ k.mT * (N + R) ** -0.5).masked_fill((c < 0)[:, None], -torch.inf)
        return torch.einsum("thl,hvl->thv", s.softmax(-1) @ k[..., :L], w_uv)

    read = int((chosen >= 0).sum()) * (L + R)
    arms = {form: partial(ours, form) for form in forms}
    arms |= {"FlashMLA": lambda: peers.flash_mla(chosen, T, (N + R) ** -0.5)}
    return Case(f"latents, {H} heads, {S} of {T}", x, (2 * read, 8 * read), truth, arms)


def expanded(T: int, H: int) -> Case:
    """All keys of latents, K = 192 and V = 128."""
    x = [t.requires_grad_() for t in draw(1, T, H, 0)]

    def ours(backend: Any) -> Function:
        return lambda *x: ring_la.mla(*x, form="expanded", backend=backend).o

    def truth(*x: Tensor) -> Tensor:
        q, latent, rotary, w_uk, w_uv = (t.double() for t in x)
        at = torch.linspace(0, T - 1, CHECKED, device="cuda").long()
        k, v = (torch.einsum("tl,hnl->htn", latent[0], w) for w in (w_uk, w_uv))
        k = torch.cat([k, rotary[0].expand(H, -1, -1)], -1)
        s = torch.einsum("thk,hjk->thj", q[0, at], k) * (N + R) ** -0.5
        s = s.masked_fill((torch.arange(T, device="cuda") > at[:, None])[:, None], -torch.inf)
        return torch.einsum("thj,hjv->thv", s.softmax(-1), v)

    arms = {name: partial(ours, name) for name in ("triton", "cudnn")} | {"PyTorch": lambda: peers.expanded}
    return Case(f"all keys of latents, {H} heads, {T}", x, None, truth, arms)


def keys(T: int, H: int, heads: int, D: int) -> list[Tensor]:
    """q, k and v."""
    rng = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, T, h, D, generator=rng, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (H, heads, heads)
    ]


def blocks(T: int, H: int, heads: int, D: int, S: int, size: int, forms: list[str]) -> Case:
    """Blocks of keys, a choice for each key head; the own block is one of them."""
    x, rng = keys(T, H, heads, D), torch.Generator("cuda").manual_seed(1)
    own = torch.arange(T, device="cuda") // size
    noise = torch.rand(T, heads, -(-T // size), generator=rng, device="cuda")
    at = torch.arange(noise.shape[2], device="cuda")
    noise = noise.masked_fill((at > own[:, None])[:, None], -1.0).masked_fill((at == own[:, None])[:, None], 2.0)
    best = noise.topk(min(S, noise.shape[2]), -1)
    numbers = torch.where(best.values < 0, -1, best.indices)[None]
    chosen = torch.where(numbers < 0, -1, numbers * size).int()

    def ours(backend: Any) -> Function:
        return lambda *x: ring_la.sparse_attention(*x, chosen=chosen, block=size, backend=backend).o

    def truth(*x: Tensor) -> Tensor:
        at = torch.linspace(0, T - 1, CHECKED, device="cuda").long()
        q, k, v = x[0].double()[0, at], x[1].double()[0], x[2].double()[0]
        places = (chosen[0, at].long()[..., None] + torch.arange(size, device="cuda")).flatten(2)
        hidden = (chosen[0, at] < 0).repeat_interleave(size, 2) | (places > at[:, None, None])
        out = []
        for h in range(heads):
            p = places[:, h].clamp(0, T - 1)
            s = q[:, h * (H // heads) : (h + 1) * (H // heads)] @ k[p, h].mT * D**-0.5
            out.append(s.masked_fill(hidden[:, h, None], -torch.inf).softmax(-1) @ v[p, h])
        return torch.cat(out, 1)

    read = int((chosen >= 0).sum()) * size * D * 2
    arms = {form: partial(ours, form) for form in forms}
    arms |= {"FLA": lambda: peers.fla_nsa(numbers, T, H, size), "PyTorch flex": lambda: peers.flex(numbers, T, H, size)}
    arms |= {"ours, all keys": lambda: lambda *x: ring_la.attention(*x).o, "PyTorch, all keys": lambda: peers.all_keys}
    name = f"blocks of {size}, {H} and {heads} heads of {D}, {S} of {T // size}"
    return Case(name, x, (2 * read, 8 * read), truth, arms, ("ours, all keys", "PyTorch, all keys"))


def moba(T: int, H: int, D: int, S: int, size: int, forms: list[str]) -> Case:
    """Blocks that each head chooses by their mean keys, in the call."""

    def ours(backend: Any) -> Function:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            chosen = block_index(q, k, size, S).places
            return ring_la.sparse_attention(q, k, v, chosen, block=size, backend=backend).o

        return call

    arms = {form: partial(ours, form) for form in forms} | {"FLA": lambda: peers.fla_moba(T, size, S)}
    arms |= {"PyTorch, all keys": lambda: peers.all_keys}
    return Case(
        f"MoBA, {H} heads of {D}, {S} of {T // size} of {size}",
        keys(T, H, H, D),
        None,
        None,
        arms,
        ("PyTorch, all keys",),
    )


def rows(case: Case, late: Callable[[], bool]) -> Iterator[dict]:
    """A row of each arm, or why there is none."""
    at = torch.linspace(0, case.x[0].shape[1] - 1, CHECKED, device="cuda").long()
    with torch.no_grad():
        want = None if case.truth is None else case.truth(*case.x)
    first: list[Tensor] = []
    for name, make in case.arms.items():
        row: dict = dict(case=case.name, arm=name)
        if late():
            yield row | dict(failed="not begun: the limit")
            continue
        try:
            function = make()
            if name not in case.others and want is not None:
                with torch.no_grad():
                    row["error"] = relative_error(function(*case.x)[0, at], want)
            row |= timed(function, case)
        except Exception as error:  # what cannot run is a line of the table
            row["failed"] = reason(error)
            yield row
            continue
        try:
            if name not in case.others:
                row |= compared(function, case, first)
            row |= timed(function, case, back=True)
        except Exception as error:
            row["failed backward"] = reason(error)
        yield row


def compared(function: Function, case: Case, first: list[Tensor]) -> dict[str, float]:
    """The largest error of the gradients, beside those of the first arm, which are put into `first`."""
    o = function(*case.x)
    do = torch.randn(o.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").to(o.dtype)
    grads = torch.autograd.grad(o, case.x, do)
    if not first:
        first += grads
        return {}
    return {"gradients": worst_error(grads, first)}


def timed(function: Function, case: Case, back: bool = False) -> dict[str, float]:
    """Milliseconds and TB/s, forward or of both passes."""

    def forward() -> None:
        with torch.no_grad():
            function(*case.x)

    def both() -> None:
        o = function(*case.x)
        torch.autograd.grad(o, case.x, o.detach())

    name = "both" if back else "forward"
    ms = median(both if back else forward)
    row = {name: round(ms, 3)}
    return row if case.moved is None else row | {f"{name} TB/s": round(case.moved[back] / ms / 1e9, 2)}


def median(call: Callable[[], object]) -> float:
    """ms of a call; of one that takes long, of one alone."""
    call()
    alone = elapsed(call)
    return alone if alone > SLOW else milliseconds(call, budget=0.1)


def index(T: int, late: Callable[[], bool]) -> Iterator[dict]:
    """The lightning indexer, 4 heads of 128, 2,048 tokens a query: by PyTorch, by the kernel, and with products of 8
    bits. `error` of the scores found, `others`: the share of chosen tokens that are not the first arm's."""
    rng = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(1, T, *s, generator=rng, device="cuda", dtype=torch.bfloat16) for s in ((4, 128), (128,)))
    w, first = torch.rand(1, T, 4, generator=rng, device="cuda"), None
    arms: list[tuple[str, dict]] = [("torch", dict(backend="torch")), ("triton", dict(backend="triton"))]
    for name, how in (*arms, ("triton, 8 bits", dict(backend="triton", fp8=True))):
        row: dict = dict(case=f"index, 4 heads of 128, 2048 of {T}", arm=name)
        if late():
            yield row | dict(failed="not begun: the limit")
            continue
        found = lightning_index(q, k, w, 2048, **how)
        first = found if first is None else first
        yield row | {
            "error": relative_error(found.scores[:, 2048:], first.scores[:, 2048:]),
            "others": others(found.places[:, 2048:], first.places[:, 2048:]),
            "forward": round(median(lambda how=how: lightning_index(q, k, w, 2048, **how)), 2),
        }


def others(got: Tensor, want: Tensor) -> float:
    """The share of chosen tokens that another choice has not, of some queries."""
    at = torch.linspace(0, got.shape[1] - 1, CHECKED, device="cuda").long()
    missed = [float((~torch.isin(a, b)).float().mean()) for a, b in zip(got[0, at, 0], want[0, at, 0])]
    return sum(missed) / CHECKED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="of queries on latents")
    parser.add_argument("--cases", nargs="+", default=["blocks", "latents", "expanded", "moba", "index"])
    parser.add_argument("--forms", nargs="+", default=["triton", "triton_sorted", "triton_blocks", "torch"])
    parser.add_argument("--limit", type=float, default=75, help="seconds after which no row is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(parser)
    began, found, T, forms = time.monotonic(), Rows(args.out, **machine()), args.tokens, args.forms

    def late() -> bool:
        return time.monotonic() - began > args.limit

    cases = {
        "blocks": [lambda: rows(blocks(T, 64, 4, 128, 32, 64, forms), late)],
        "latents": [lambda H=H: rows(latents(T, H, 2048, forms), late) for H in args.heads],
        "expanded": [lambda H=H: rows(expanded(T, H), late) for H in args.heads],
        "moba": [lambda: rows(moba(T, 16, 128, 8, 512, forms), late)],
        "index": [lambda: index(T, late)],
    }
    for make in (make for name in args.cases for make in cases[name]):
        for row in make():
            found.add(row)


if __name__ == "__main__":
    main()
