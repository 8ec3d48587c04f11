"""Does anything but the covered layers know a token's neighbours or its place? Measured on the model itself.

Everything runs on one device on a few tokens, and only ring_la's operators are told where documents start.

1.  Two documents side by side, positions counting on over their border. One is changed; where a token of the other one
    changes too, a module carries something along the sequence in a way of its own.
2.  Equal tokens at equal positions, each a document of its own. Where their results differ, a module goes by the place
    of a token in the tensor, which on a split sequence is not its place in the sequence. Computing with a range as long
    as the tensor counts too: it may matter only after thousands of tokens.
3.  Positions given and positions left to the model. Where results differ, the model does not count from 0.

The first two are made again with other tokens where they find something: a router's near-tie, or a gate that is nearly
closed, so that rounding is all of it, does not come twice.

Meanwhile parameters that are all zero are random: behind a gate that is closed nothing could be seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ...errors import RingLAError, UnsupportedError
from .traces import Trace, Watch, sketch

TOKENS = 283
"""Longer than two blocks of the 128 tokens that compressing layers work on, none of which begins in the middle."""
PLACES = 23
"""Tokens of the second check."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}

Run = Callable[[Tensor, "Tensor | None", Sequence[int]], object]
"""Calls a model with ids ``[1, T]``, positions ``[1, T]`` or None, and offsets of documents."""


def check(model: nn.Module, run: Run, vocabulary: int, longest: int, device: torch.device) -> None:
    """Raise `UnsupportedError` naming the module for a model that cannot run on a split sequence.

    Args:
        vocabulary: the number of token ids. longest: the largest number of positions the model was made for.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    probe = _Probe(model, run, vocabulary, min(TOKENS, longest), device, TOLERANCE.get(dtype, 3e-2))
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), _without_zeros(model), torch.device("cpu"):  # whatever the default device is
            probe.neighbours()
            probe.places()
            probe.positions()
    finally:
        for m, training in modes:
            m.training = training


@dataclass(frozen=True)
class _Probe:
    model: nn.Module
    run: Run
    vocabulary: int
    tokens: int
    device: torch.device
    tolerance: float

    def neighbours(self) -> None:
        """The first check."""
        found = self._leaks(0)
        if not found:
            return
        again = self._leaks(1)
        name = next((n for n in found if found[n] & again.get(n, set())), None)
        if name is not None:
            raise UnsupportedError(
                "model",
                "layers that work token by token, or are listed in ring_la.integrations.transformers.mixers",
                f"{self._describe(name)}, whose result at one token depends on other tokens",
            )

    def _leaks(self, seed: int) -> dict[str, set[int]]:
        """For modules whose input did not change with the other document, the tokens whose result did."""
        one, two = self._ids(2, seed)
        border = self.tokens // 2
        first, second = torch.cat([two[:border], one[border:]]), torch.cat([one[:border], two[border:]])
        offsets, positions = (0, border, self.tokens), torch.arange(self.tokens)
        base, after_first, after_second = (self._traces(x, offsets, positions) for x in (one, first, second))
        out: dict[str, set[int]] = {}
        for name, trace in base.items():
            changed: set[int] = set()
            for other, kept in ((after_first, slice(border, self.tokens)), (after_second, slice(0, border))):
                if name not in other or (name and not self._same(trace.before, other[name].before, kept)):
                    continue
                far = self._far(trace.after[kept], other[name].after[kept])
                changed |= {int(t) + kept.start for t in far.nonzero().flatten()}
            if changed:
                out[name] = changed
        return out

    def places(self) -> None:
        """The second check."""
        token = self.vocabulary // 2
        found, name = self._uneven(token)
        if found and name is None:
            again, name = self._uneven((token + 1) % self.vocabulary)
            name = next((n for n in found if n in again), name)
        if name is not None:
            got = f"{self._describe(name)}, which goes by the place of a token in its tensor"
            raise UnsupportedError("model", "layers that take positions from position_ids", got)

    def _uneven(self, token: int) -> tuple[list[str], str | None]:
        """Modules that give one token, wherever it comes, unlike results; and one that computes with places."""
        ids, threes = torch.full((PLACES,), token), torch.full((PLACES,), 3)
        with _Ranges(PLACES) as ranges:
            traces = self._traces(ids, range(PLACES + 1), threes, ranges.inside)
        everything = slice(0, PLACES)
        uneven = [
            n
            for n, t in traces.items()
            if (not n or self._same(t.before, t.before[:1] if t.before is not None else None, everything))
            and bool(self._far(t.after, t.after[:1]).any())
        ]
        return uneven, ranges.culprit

    def positions(self) -> None:
        """The third check."""
        (ids,), n = self._ids(1, 0), self.tokens
        given, own = (self._traces(ids, (0, n), p)[""] for p in (torch.arange(n), None))
        if bool(self._far(given.after, own.after).any()):
            got = f"{type(self.model).__name__}, which counts them in another way"
            raise UnsupportedError("model", "positions that count from 0 where position_ids are not given", got)

    def _ids(self, count: int, seed: int) -> Tensor:
        """Random ids ``[count, tokens]``."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocabulary, (count, self.tokens), generator=random)

    # -- running and comparing -----------------------------------------------------------------------------

    def _traces(
        self, ids: Tensor, offsets: Sequence[int], positions: Tensor | None, inside: list[str] | None = None
    ) -> dict[str, Trace]:
        """What every module took and gave in a run, in the order they finish; the model itself is ""."""
        inside = [] if inside is None else inside
        rows = [x if x is None else x[None].to(self.device) for x in (ids, positions)]
        with Watch(self.model, len(ids), inside) as watch, self._blamed(inside):
            output = self.run(*rows, offsets)  # type: ignore[arg-type, call-arg]
        whole = sketch(output, len(ids))
        if whole is None:
            got = f"{type(self.model).__name__}, which does not"
            raise UnsupportedError("model", "a model that returns logits or hidden states for every token", got)
        return watch.traces | {"": Trace(None, whole)}

    @contextmanager
    def _blamed(self, inside: list[str]) -> Iterator[None]:
        """An error becomes one that names the module it came from, the last of those `inside`."""
        try:
            yield
        except RingLAError as error:
            where = self._describe(inside[-1] if inside else "")
            if isinstance(error, UnsupportedError) and error.name == "model":
                raise UnsupportedError("model", error.expected, f"{where}: {error.got}") from error
            raise UnsupportedError("model", "layers that can run on a split sequence", f"{where}: {error}") from error
        except Exception as error:
            where = self._describe(inside[-1] if inside else "")
            got = f"{where}, which failed: {type(error).__name__}: {error}"
            runs = "a model that runs with attention through the library's attention and mask functions"
            raise UnsupportedError("model", runs, got) from error

    def _far(self, a: Tensor, b: Tensor) -> Tensor:
        """Where rows differ by more than rounding, bool ``[T]``."""
        return (a - b).norm(dim=-1) > self.tolerance * (a.norm(dim=-1) + 1e-12)

    def _same(self, a: Tensor | None, b: Tensor | None, rows: slice) -> bool:
        """Whether a module is known to have taken the same rows twice."""
        if a is None or b is None:
            return False
        return not bool(self._far(a[rows], b[rows] if len(b) > 1 else b).any())

    def _describe(self, name: str) -> str:
        kind = type(self.model.get_submodule(name)).__name__
        return f"{name} ({kind})" if name else kind


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Parameters that are zero get small random values: adapters start with a zero that would hide what they do.
    Those of a kind of their own, such as quantised ones, are left alone."""
    zeros: list[Tensor] = []
    for p in model.parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        plain = type(local) in (Tensor, nn.Parameter)
        if plain and p.dtype in TOLERANCE and local.numel() and not local.reshape(-1)[:64].any() and not local.any():
            random = torch.Generator(local.device).manual_seed(len(zeros))
            zeros.append(local.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3, generator=random))
    try:
        yield
    finally:
        for local in zeros:
            local.zero_()


class _Ranges(TorchFunctionMode):
    """Finds the module that computes with ``torch.arange(length)`` as numbers rather than as indices.

    Attributes:
        inside: names of the modules being run, outermost first.
        culprit: the first module found.
    """

    INDEXING = {
        "__getitem__",
        "__setitem__",
        "index_select",
        "gather",
        "scatter",
        "index_add",
        "index_add_",
        "embedding",
    }

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.inside: list[str] = []
        self.culprit: str | None = None
        self._ranges: dict[int, Tensor] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name == "arange":
            if out.shape == (self.length,) and not _called_from("ring_la"):
                self._ranges[id(out)] = out  # kept alive, so that its id stays its own
        elif isinstance(out, Tensor) and name not in self.INDEXING and self._ranges:
            if any(id(x) in self._ranges for x in args):
                if out.is_floating_point() and self.culprit is None:
                    self.culprit = self.inside[-1] if self.inside else ""
                elif out.dtype in (torch.int32, torch.int64):
                    self._ranges[id(out)] = out
        return out


def _called_from(package: str) -> bool:
    """Whether the nearest caller outside torch and this module is in a package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] != "torch":
            return name.partition(".")[0] == package
        frame = frame.f_back
    return False
