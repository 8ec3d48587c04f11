"""Split calls by the kernels in CUDA C++, run on a CPU (`tests.support.hopper`), against one device in fp64: the ranks
are processes, which exchange states by messages or by mailboxes in files.

Spans are of 64 tokens. Heads forget in all of them, in none, in the spans of every other run of tokens, and beside two
borders.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ring_la
from tests.support import hopper
from tests.support.file_mailboxes import over_files
from tests.support.interpreter import interpreted
from tests.support.pool import group

interpreted()

LIMIT = 6e-3
"""Relative error of bf16, as on a GPU."""
RUN = 70
"""Tokens that a head forgets in, or does not; and of a segment of two ranks' zigzag."""
H = 4


def emulated() -> ExitStack:
    """The kernels, and what chooses them, as on a GPU."""
    from ring_la.kernels import choice, families, gpu
    from ring_la.kernels.wy import across, gdn_launches, kda_launches, one_launch

    changes = ExitStack()

    def change(where, **named) -> None:
        for name, value in named.items():
            changes.enter_context(mock.patch.object(where, name, value))

    def here(module, name):
        made = getattr(module, name)
        return functools.cache(lambda *how, **more: hopper.Emulated(made(*how, **more)))

    change(choice, unsupported=lambda rule, x, recurrent=False: families.unsupported(rule, x))
    change(one_launch, unsupported=lambda inputs, packed: "", LEAST=0)
    change(gpu, multiprocessors=lambda device: 10**6)
    for module in (gdn_launches, kda_launches):
        change(module, side_by_side=lambda programs, device: False)
    change(gdn_launches, zeros=hopper.Emulated.zeros)
    change(across, clear=hopper.Emulated.clear)
    change(gdn_launches, across=lambda *sizes: (64, 64), span=lambda *sizes: 64)
    change(gdn_launches, forward_kernel=here(gdn_launches, "forward_kernel"))
    change(gdn_launches, backward_kernel=here(gdn_launches, "backward_kernel"))
    change(kda_launches, kernel=here(kda_launches, "kernel"))
    return changes


def drawn(T: int, diagonal: bool) -> dict[str, Tensor]:
    """Tokens of four heads: one forgets, one does not, one does in every other run; the last at the end of the first
    run and at the beginning of the fourth."""
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(1, T, H, 128), dim=-1).bfloat16() for _ in range(2))
    t = torch.arange(T)
    falls = torch.stack([t >= 0, t < 0, t // RUN % 2 == 0, (t - RUN + 32) * (RUN - t) > 0], 1)
    falls[3 * RUN : 3 * RUN + 32, 3] = True
    g = torch.where(falls, 4.0, 0.01)[..., None] * F.logsigmoid(torch.randn(1, T, H, 128))
    v, beta = torch.randn(1, T, H, 128).bfloat16(), torch.randn(1, T, H).sigmoid()
    return {"q": q, "k": k, "v": v, "g": (g if diagonal else g[..., 0]).clamp(-5, 0), "beta": beta}


def ended(function, x: dict[str, Tensor], S0: Tensor | None, do: Tensor, dS: Tensor | None, **where) -> list[Tensor]:
    """o, the final state if its gradient is given, and all gradients."""
    leaves = [t.clone().requires_grad_() for t in (*x.values(), *(() if S0 is None else (S0,)))]
    out = function(
        *leaves[: len(x)],
        initial_state=None if S0 is None else leaves[-1],
        output_final_state=dS is not None,
        **where,
    )
    outs, given = ([out.o], [do]) if dS is None else ([out.o, out.final_state], [do, dS])
    return [t.detach() for t in outs] + list(torch.autograd.grad(outs, leaves, given))


def check(rank: int, size: int, folder: str, name: str, kind: str, cu: tuple[int, ...] | None, how: str, T: int):
    """Squares of errors and of what is true, of each result with initial and final states and without; how many calls
    went by these kernels, and how many by those of one device."""
    from ring_la.kernels.wy import gdn_launches, one_launch
    from ring_la.kernels.wy.scanned_spans import ScannedSpans

    cp = ring_la.ContextParallel(group(size), scan="ring", validate="never")
    if how != "messages":
        cp.comm = over_files(rank, size, folder, timeout=20, dense=(4 * H, 4096))
        cp.comm.transport = cp.comm.mailboxes.torch
    function = {
        "kda": functools.partial(ring_la.kda, lower_bound=-5.0),
        "gated_delta_rule": ring_la.gated_delta_rule,
    }[name]
    layout, x, N = cp.layout(T, kind, cu), drawn(T, name == "kda"), 1 if cu is None else len(cu) - 1
    if how == "mail":  # all heads forget, so that kernels send and take states themselves
        x["g"] = x["g"].clamp(max=-1)
    S0, dS, do = torch.randn(N, H, 128, 128), torch.randn(N, H, 128, 128), torch.randn(1, T, H, 128).bfloat16()
    wide = {n: t.double() for n, t in x.items()}
    offsets, squares = None if cu is None else torch.tensor(cu), []
    across = mock.patch.object(ScannedSpans, "of", side_effect=ScannedSpans.of)
    whole_spans = mock.patch.object(gdn_launches, "forward", side_effect=gdn_launches.forward)
    least = one_launch.Least() if how == "nothing" else one_launch.Least(0, 0, 0)
    with emulated(), mock.patch.object(one_launch, "ACROSS", least), across as calls, whole_spans as alone:
        for states in (True, False):
            first, last = (S0, dS) if states else (None, None)
            whole = ended(
                function, wide, S0.double() if states else None, do.double(), dS.double() if states else None,
                cu_seqlens=offsets, backend="torch",
            )  # fmt: skip
            mine = {n: layout.shard(t) for n, t in x.items()}
            each = None if last is None else last / size  # the sum over ranks counts
            got = ended(function, mine, first, layout.shard(do), each, layout=layout)
            alike = {1, len(got) - 1} if states else set()  # states are those of all ranks
            for i, (found, true) in enumerate(zip(got, whole, strict=True)):
                true = true if i in alike else layout.shard(true)
                squares.append(((found.double() - true).square().sum().item(), true.square().sum().item()))
    return torch.tensor(squares, dtype=torch.float64), calls.call_count, alone.call_count


CASES = [
    ("kda", 2, "zigzag", (0, 80, 280), "links"),
    ("kda", 2, "zigzag", None, "links"),
    ("gated_delta_rule", 3, "contiguous", None, "links"),
    ("kda", 3, "contiguous", None, "links"),
    ("kda", 3, "contiguous", None, "mail"),
    ("kda", 4, "contiguous", None, "messages"),
]
"""Rule, ranks, layout, documents, and what states go by."""


@pytest.mark.parametrize(("name", "size", "kind", "cu", "how"), CASES)
def test_against_one_device(ranks, tmp_path, name, size, kind, cu, how):
    found = ranks.run(size, check, size, str(tmp_path), name, kind, cu, how, 4 * RUN, timeout=600)
    right(found)
    assert all(calls >= 4 and not alone for _, calls, alone in found)


def right(found: list[tuple[Tensor, int, int]]) -> None:
    errors, sizes = sum(squares for squares, _, _ in found).unbind(1)
    assert (errors / sizes).sqrt().max() <= LIMIT


def test_documents_within_ranks_go_as_on_one_device(ranks, tmp_path):
    """No state crosses: the kernels are those of one device, also where none exchange states."""
    case = "gated_delta_rule", "contiguous", (0, 2 * RUN, 3 * RUN, 4 * RUN), "nothing"
    found = ranks.run(2, check, 2, str(tmp_path), *case, 4 * RUN, timeout=600)
    right(found)
    assert all(calls == 0 and alone == 2 for _, calls, alone in found)
