"""Launches of the delta rules' kernels in CUDA C++ on Hopper (`gdn_forward.cu`, `gdn_backward.cu`): one each way, with
gates or without.

Chunks have 32 tokens. Spans are long, since one may begin up to sixteen chunks early, or waits for the one before it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ring_la.kernels.protocol import Inputs
from ring_la.kernels.runtime.cuda_kernel import CudaKernel
from ring_la.kernels.runtime.zeros import zeros
from ring_la.kernels.sizes import cdiv
from ring_la.kernels.wy.passing import MAIL, Passing
from ring_la.kernels.wy.span_call import CHUNK, HEAD, SpanCall, side_by_side
from ring_la.kernels.wy.span_launches import KeptChunks, SpanLaunches, States, heads_at_a_time

LINK, EARLY = 3, 12
"""Chunks that a link of the line of spans that wait is worth, and about which a span goes over before its own."""
SCANNED = 7
"""Chunks that finding a span's map and scanning over it, on two ranks one behind the other, take beside its tokens.
Where launches find what enters spans themselves nothing is scanned over; lengths by this are those that were timed."""
CARRYING = 6
"""Chunks that sending and taking a state are worth."""
TOGETHER = 4
"""Spans that wait for each other and combine what they leave, so that a state is handed on once for all of them."""
GROUPED = 16
"""Spans of a row from which on they do."""
UNEVEN = 5
"""Spans of a row up to which the outer one, which goes over its tokens once where others go three times, has twice as
many. Of eight an H200 took 3 % longer forward and backward."""
PARTS = 2**28
"""Bytes of what they leave, in a call; and of what halves of spans whose maps are found leave."""
ARGUMENTS = "22Q12if4x"
SHARED = 7 * 28672 + 8192 + 4 * 2304 + 7 * 384 + 7 * 16 + 64 + 16 + 144 + 16 + 1024
BACKWARD_SHARED = 3 * 50176 + 2 * 32768 + 1024 + 2048 + 64 + 3 * 32 + 16 + 16 + 144 + 16 + 1024
KEEPING_SHARED = 6 * 30720 + 32768 + 4 * 2304 + 6 * 384 + 6 * 16 + 48 + 16 + 144 + 16 + 1024


@functools.cache
def forward_kernel(
    keep: bool, *defines: str, maps: bool = False, early: bool = False, mailed: bool = False
) -> CudaKernel:
    """`keep`: it leaves what a backward wants of chunks; `maps`: it finds spans' maps alone;
    `early`: it follows the launch of its flags; `mailed`: see `Passing`."""
    file, shared = Path(__file__).parent / "gdn_forward.cu", KEEPING_SHARED if keep else SHARED
    defines = (f"KEEP={int(keep)}", f"MAPS={int(maps)}", f"MAILED={int(mailed)}", *defines)
    return CudaKernel(file, "gdn_forward", ARGUMENTS + MAIL * mailed, 512, shared, defines, early)


@functools.cache
def backward_kernel(*defines: str, maps: bool = False, early: bool = False, mailed: bool = False) -> CudaKernel:
    file, arguments = Path(__file__).parent / "gdn_backward.cu", ARGUMENTS + MAIL * mailed + "6Q"
    defines = (f"MAPS={int(maps)}", f"MAILED={int(mailed)}", *defines)
    return CudaKernel(file, "gdn_backward", arguments, 384, BACKWARD_SHARED, defines, early)


def span(tokens: int, heads: int, pieces: int, programs: int, equal: bool = False) -> int:
    """Tokens a span by what a forward costs, in chunks that a program works through: a line of spans that wait, or what
    all spans take of `programs` at a time where a quarter of the heads wait and the others start early. As many pieces
    stay whole; fewer that may not be `equal` only where there are several."""
    if pieces * heads >= programs:
        return cdiv(tokens, CHUNK) * CHUNK
    each = cdiv(cdiv(tokens, pieces), CHUNK) * CHUNK
    lengths = {min(n, each) for n in (256, 512, 1024, 2048, 4096)} | ({each} if equal or pieces > 3 else set())
    best, least = each, math.inf
    for length in sorted(lengths, reverse=True):
        count, c = cdiv(each, length), length // CHUNK
        share = pieces * heads * count / programs
        if share > 1 and length < 512:
            continue  # measured: what a span takes to begin is dearer than that
        if count == 1:
            cost: float = math.ceil(share) * c
        else:
            links = count - 1 if count < GROUPED else TOGETHER + 1 + count // TOGETHER
            line = 2 * c if count == 2 else 3 * c + LINK * links
            cost = max(line, c + EARLY if share <= 1 else share * (1.5 * c + EARLY) + c / 2)
        if cost < 0.95 * least:
            best, least = length, cost
    return best


def unequal(tokens: int, length: int, rows: int, programs: int) -> tuple[int, int]:
    """Tokens a span and of the outer one, of `rows` of so many tokens: where all spans run at once, and there are some
    between the first and the last, the outer one goes over its tokens while the others go over theirs twice."""
    count = cdiv(tokens, length)
    count = max(count, min(programs // rows, UNEVEN))
    if not 2 < count <= UNEVEN or count * rows > programs:
        return length, length
    each = cdiv(cdiv(tokens, CHUNK), count + 1) * CHUNK
    return each, 2 * each


def cut(tokens: int, heads: int, pieces: int, programs: int, equal: bool) -> tuple[int, int]:
    """Tokens a span and of a row's outer one (see `SpanCall`)."""
    length = span(tokens, heads, pieces, programs, equal)
    return unequal(tokens // pieces, length, pieces * heads, programs) if equal else (length, length)


def across(tokens: int, heads: int, pieces: int, programs: int, equal: bool) -> tuple[int, int]:
    """Tokens a span, all alike, where states are exchanged: by what it costs to find maps, where a quarter of the heads
    wait, to scan over spans and to go over all of them, in chunks of that last pass."""
    each, rows = cdiv(cdiv(tokens, pieces), CHUNK) * CHUNK, pieces * heads

    def cost(length: int) -> float:
        count, c = cdiv(each, length), length // CHUNK
        share = rows * count / programs
        last = c + EARLY if share <= 1 else share * (c + EARLY) + c / 2
        return max(1, share / 2) * c + SCANNED * count + last

    return (min((4096, 2048, 1024, 512), key=cost),) * 2


def carrying(tokens: int, heads: int, pieces: int, programs: int, equal: bool) -> tuple[int, int]:
    """The same where the launch over all spans carries states itself, and no gradients follow: the outer span is
    shorter, since its program also sends and takes, where others go over chunks that forget."""
    length, _ = across(tokens, heads, pieces, programs, equal)
    each = cdiv(tokens // pieces, CHUNK)
    outer, count = length // CHUNK - CARRYING, cdiv(each * CHUNK, length)
    if not equal or count < 2 or outer < CARRYING:
        return length, length
    return cdiv(each - outer, count - 1) * CHUNK, outer * CHUNK


def picks(programs: int, device: torch.device) -> bool:
    """Whether programs take spans that wait first: where all run at once that is the same."""
    return not side_by_side(programs, device)


def combined(length: int, tokens: int, states: int) -> int:
    """How many spans combine, where a row of `tokens` has enough of them and all `states` have room."""
    fits = states * 2 * HEAD * HEAD * 4 <= PARTS
    return TOGETHER if fits and tokens >= GROUPED * length else 1


class GDNCall(SpanCall):
    """One device's tokens, as the delta rules' kernels take them; g is None where there are no gates."""

    @property
    def defines(self) -> tuple[str, str, str]:
        g, beta = self.inputs.g, self.inputs.beta
        bf16 = torch.bfloat16
        return (
            f"GATED={int(g is not None)}",
            f"GATE_BF16={int(g is not None and g.dtype == bf16)}",
            f"BETA_BF16={int(beta.dtype == bf16)}",
        )

    def launch(
        self, kernel: Callable[..., CudaKernel], heads: range, o: Tensor | None, states: States,
        kept: KeptChunks | tuple[None, None, None], further: tuple[Tensor | None, ...] = (),
        passing: Passing | None = None,
    ) -> None:  # fmt: skip
        """`kernel(early=…, mailed=…)`: where programs wait, it follows the launch of their flags. `states`: those it
        begins with and those it ends with (gradients, backward)."""
        x, device = self.inputs, self.inputs.v.device
        (_, T, H, _), programs = x.v.shape, self.count * len(heads)
        pick = picks(programs, device) if passing is None else passing.maps and side_by_side(programs, device)
        passing = self._passing() if passing is None else passing
        waits, flags, told = passing.waits, passing.zero, None
        if waits:
            flags = zeros(2 * self.count * H + 3 + programs, device)
        if passing.maps:
            told = zeros(3 + (2 * (2 if further else 4) - 1) * self.count * H, device)  # by `PARTS` of each kernel
        table, outer = None if self.runs is None else self.runs.table, -self.outer if further else self.outer
        kernel(early=not passing.given, mailed=bool(passing.mail))(
            programs, *x.qkv, x.g, x.beta, o, *states, table, self.cu, flags, passing.states, passing.parts,
            passing.squares, passing.half, passing.extra, told, passing.image, passing.arrived, *kept, T, H,
            x.q.shape[2], self.count, self.length, self.pieces, heads.start, len(heads), passing.given, pick,
            passing.together, outer, self.scale, *passing.mail, *further,
        )  # fmt: skip

    def _passing(self) -> Passing:
        """Room for it."""
        _, T, H, _ = self.inputs.v.shape
        together = combined(self.length, T, self.count * H)
        parts = self.new(self.count, H, 2, HEAD, HEAD) if together > 1 else None
        return Passing(self.new(self.count, H, HEAD, HEAD), parts, together)


def halves(call: GDNCall) -> int:
    """In how many parts a span's maps are found, each by programs of its own: two where there is room."""
    spans = call.count * call.inputs.v.shape[2]
    return 2 if spans * 2 * HEAD * HEAD * 4 <= PARTS else 1


def group(chunks: int, heads: int) -> int:
    """Heads at a time whose chunks are held."""
    return heads_at_a_time(chunks, heads, HEAD * HEAD + CHUNK * HEAD + 2 * CHUNK * CHUNK)


def room(call: GDNCall, heads: int) -> KeptChunks:
    """For what a backward wants of chunks."""
    shape, bf16 = (call.chunks, heads), torch.bfloat16
    return KeptChunks(
        call.new(*shape, HEAD, HEAD, dtype=bf16),
        call.new(*shape, CHUNK, HEAD, dtype=bf16),
        call.new(*shape, 2, CHUNK, CHUNK, dtype=bf16),
    )


def _run(call: GDNCall, heads: range, o: Tensor | None, states: States, kept: KeptChunks | None) -> None:
    o = torch.empty_like(call.inputs.v) if o is None else o
    kernel = functools.partial(forward_kernel, kept is not None, *call.defines)
    call.launch(kernel, heads, o, states, kept or (None,) * 3)


def _back(call: GDNCall, heads: range, states: States, kept: KeptChunks, do: Tensor, to: Inputs) -> None:
    kernel = functools.partial(backward_kernel, *call.defines)
    call.launch(kernel, heads, None, states, kept, (do, *to.qkv, to.g, to.beta))


LAUNCHES = SpanLaunches(
    lambda x, cu, scale: GDNCall.of(x, cu, scale, cut),
    room,
    lambda chunks, heads: group(chunks, heads),
    _run,
    _back,
    GDNCall.results,
)
keeps, forward, gradients = LAUNCHES.keeps, LAUNCHES.forward, LAUNCHES.gradients
