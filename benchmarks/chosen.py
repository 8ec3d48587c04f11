"""Kernels for chosen keys on one GPU, beside those of others: `python -m benchmarks.chosen [--out FILE]`.

Two cases, bf16, causal, choices spread over what a query may read: latents of 512 + 64 (DeepSeek), 2,048 keys a
query; and keys of 128, 16 query heads a key head, 32 blocks of 64 (NSA). Each row: milliseconds forward, and forward +
backward; TB/s of what a call reads of keys and adds to their gradients; the error of o against the fp64 loop of some
queries. FlashMLA's sparse prefill has no backward. What cannot run says why. --limit: seconds after which no row is
begun.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import ring_la
from benchmarks.options import need_gpus

from .latents import L, N, R, draw
from .ops.measure import milliseconds
from .sparse import choose

Function = Callable[..., Tensor]
CHECKED = 64
"""Queries whose results are compared."""


class Case(NamedTuple):
    """Tensors of a case, its choice, bytes that forward and both passes move by atomics and reads, and arms by name."""

    name: str
    x: list[Tensor]
    moved: tuple[int, int]
    truth: Function
    arms: dict[str, Callable[[], Function]]


def latents(T: int, H: int, S: int, forms: list[str]) -> Case:
    """Queries on latents. Ours take latents and up-projections; FlashMLA's queries that were taken to the latents."""
    x = [t.requires_grad_() for t in draw(1, T, H, 0)]
    chosen = choose(torch.arange(T, device="cuda"), S)

    def ours(backend: str) -> Function:
        return lambda *x: ring_la.mla(*x, chosen=chosen, backend=backend).o

    def flash_mla() -> Function:
        from flash_mla import flash_mla_sparse_fwd  # type: ignore[import-not-found]

        if H % 64:
            raise ValueError(f"it takes heads by 64, not {H}")
        rows = torch.where(chosen < 0, T, chosen)[0]

        def call(q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
            low = torch.cat([torch.einsum("bthd,hdl->bthl", q[..., :N], w_uk), q[..., N:]], -1)
            keys = torch.cat([latent, k_rope], -1)[0, :, None]
            o = flash_mla_sparse_fwd(low[0], keys, rows, (N + R) ** -0.5, L)[0]
            return torch.einsum("thl,hvl->thv", o, w_uv)[None]

        return call

    def truth(*x: Tensor) -> Tensor:
        q, latent, rotary, w_uk, w_uv = (t.double() for t in x)
        at = torch.linspace(0, T - 1, CHECKED, device="cuda").long()
        low = torch.cat([torch.einsum("thd,hdl->thl", q[0, at, :, :N], w_uk), q[0, at, :, N:]], -1)
        c = chosen[0, at, 0].long()
        k = torch.cat([latent, rotary], -1)[0, c.clamp(min=0)]
        s = (low @ k.mT * (N + R) ** -0.5).masked_fill((c < 0)[:, None], -torch.inf)
        return torch.einsum("thl,hvl->thv", s.softmax(-1) @ k[..., :L], w_uv)

    read = int((chosen >= 0).sum()) * (L + R)
    arms = {form: (lambda f=form: ours(f)) for form in forms} | {"FlashMLA": flash_mla}
    return Case(f"latents, {H} heads, {S} of {T}", x, (2 * read, 8 * read), truth, arms)


def blocks(T: int, H: int, heads: int, D: int, S: int, size: int, forms: list[str]) -> Case:
    """Blocks of keys, a choice for each key head; the own block is one of them."""
    rng = torch.Generator("cuda").manual_seed(0)
    x = [
        torch.randn(1, T, h, D, generator=rng, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (H, heads, heads)
    ]
    own = torch.arange(T, device="cuda") // size
    noise = torch.rand(T, heads, -(-T // size), generator=rng, device="cuda")
    at = torch.arange(noise.shape[2], device="cuda")
    noise = noise.masked_fill((at > own[:, None])[:, None], -1.0).masked_fill((at == own[:, None])[:, None], 2.0)
    best = noise.topk(S, -1)
    numbers = torch.where(best.values < 0, -1, best.indices)[None]
    chosen = torch.where(numbers < 0, -1, numbers * size).int()

    def ours(backend: str) -> Function:
        return lambda *x: ring_la.sparse_attention(*x, chosen=chosen, block=size, backend=backend).o

    def fla() -> Function:
        from fla.ops.nsa import parallel_nsa

        gate = torch.ones(1, T, H, device="cuda", dtype=torch.bfloat16)
        at, counts = torch.where(numbers < 0, own.max() + 1, numbers).sort(-1).values.long(), (numbers >= 0).sum(-1)
        return lambda q, k, v: parallel_nsa(
            q, k, v, g_slc=gate, block_indices=at, block_counts=counts, block_size=size, window_size=0
        )

    def flex() -> Function:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        seen = torch.zeros(heads, T, T // size + 1, dtype=torch.bool, device="cuda")
        seen.scatter_(2, torch.where(numbers < 0, T // size, numbers)[0].transpose(0, 1).long(), True)
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & seen[h // (H // heads), i, j // size], 1, H, T, T, device="cuda"
        )
        call = torch.compile(flex_attention)
        return lambda *x: call(*(t.transpose(1, 2) for t in x), block_mask=mask, enable_gqa=True).transpose(1, 2)

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

    def everything() -> Function:
        return lambda q, k, v: ring_la.attention(q, k, v).o

    read = int((chosen >= 0).sum()) * size * D * 2
    arms = {form: (lambda f=form: ours(f)) for form in forms}
    arms |= {"FLA": fla, "PyTorch flex": flex, "all keys": everything}
    name = f"blocks of {size}, {H} and {heads} heads of {D}, {S} of {T // size}"
    return Case(name, x, (2 * read, 8 * read), truth, arms)


def rows(case: Case, late: Callable[[], bool]) -> Iterator[dict]:
    """A row of each arm, or why there is none."""
    at = torch.linspace(0, case.x[0].shape[1] - 1, CHECKED, device="cuda").long()
    with torch.no_grad():
        want = case.truth(*case.x)
    for name, make in case.arms.items():
        row: dict = dict(case=case.name, arm=name)
        if late():
            yield row | dict(failed="not begun: the limit")
            continue
        try:
            function = make()
            with torch.no_grad():
                o = function(*case.x)[0, at]
            if name != "all keys":
                row["error"] = float((o.double() - want).norm() / want.norm())
            row |= timed(function, case)
        except Exception as error:  # what cannot run is a line of the table
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            row |= {"failed backward" if "forward" in row else "failed": why}
        yield row


def timed(function: Function, case: Case) -> Iterator[tuple[str, float]]:
    """Milliseconds and TB/s, forward first."""
    do = torch.randn_like(function(*case.x))

    def forward() -> None:
        with torch.no_grad():
            function(*case.x)

    def both() -> None:
        torch.autograd.grad(function(*case.x), case.x, do)

    for name, call, moved in zip(("forward", "both"), (forward, both), case.moved):
        ms = milliseconds(call)
        yield name, round(ms, 3)
        yield f"{name} TB/s", round(moved / ms / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="of queries on latents")
    parser.add_argument("--forms", nargs="+", default=["triton", "triton_sorted", "torch"])
    parser.add_argument("--limit", type=float, default=75, help="seconds after which no row is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(parser)
    began, found = time.monotonic(), []
    cases = [lambda: blocks(args.tokens, 64, 4, 128, 32, 64, args.forms)]
    cases += [lambda H=H: latents(args.tokens, H, 2048, args.forms) for H in args.heads]
    for make in cases:
        for row in rows(make(), lambda: time.monotonic() - began > args.limit):
            print(json.dumps(row), flush=True)
            found.append(row)
            if args.out:
                args.out.write_text(json.dumps(dict(torch=torch.__version__, rows=found), indent=1))


if __name__ == "__main__":
    main()
