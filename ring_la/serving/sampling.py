"""How the next tokens of sequences are chosen, all of a batch by the same operators; and what the model itself said of
each token.

Of a sequence's logits z and numbers c of the times each token was chosen so far (OpenAI's definition), the token is the
likeliest of

    y = z + bias − frequency_penalty · c − presence_penalty · [c > 0]

or, at a temperature, that of the `top_k` and `top_p` with the largest exp(y / temperature) / E, where E is an
exponential number of each token: so a token comes as often as softmax(y / temperature) says. These numbers follow from
the sequence's seed, how many tokens were chosen before, and the token (`dice`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import is_finite, is_int
from ..errors import ArgumentError
from ..inference import Sampler
from ..kernels.choice import triton_installed
from .dice import STRIDE, minus_exponential, places, stream


class Said(NamedTuple):
    """What the model said of a token, before bias, penalties and temperature."""

    logprob: float
    """Natural logarithm of the token's probability."""
    top: list[tuple[int, float]]
    """The likeliest tokens and the same of them, the likeliest first."""


class ChosenToken(NamedTuple):
    """A token of a sequence."""

    token: int
    said: Said | None = None
    """What the model said of it, where that is wanted."""


class Ways(IntFlag):
    """What is done beside taking the likeliest of the logits: for a batch all that one of its rows needs."""

    CHANGED = 1
    """Bias and penalties."""
    DRAWN = 2
    """A temperature."""
    CUT = 4
    """Of the `top_k` or `top_p` alone."""


LARGEST = 2**63
"""The largest int that is taken for a number."""


@dataclass(frozen=True)
class Chooser:
    """How one sequence's tokens are chosen.

    Attributes:
        sampler: what chooses, after bias and penalties. Its generator is left alone.
        bias: added to the logits of some tokens. presence, frequency: see the module's text.
        logprobs: how many of the likeliest tokens to tell of beside the one that is chosen; None: tell nothing.
        seed: of what is drawn, of 64 bits; None: another one each time.

    Raises:
        ArgumentError: a value that makes no sense, by its name.
    """

    sampler: Sampler = field(default_factory=Sampler)
    bias: Mapping[int, float] = field(default_factory=dict)
    presence: float = 0.0
    frequency: float = 0.0
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        numbers = [("presence_penalty", self.presence), ("frequency_penalty", self.frequency)]
        for name, value in numbers:
            if not is_finite(value):
                raise ArgumentError(name, "a finite number", repr(value))
        numbers += [("temperature", self.sampler.temperature), *(("logit_bias", x) for x in self.bias.values())]
        for name, value in numbers:
            if isinstance(value, int) and abs(value) > LARGEST:  # no float holds it
                raise ArgumentError(name, f"a number of at most {LARGEST}", f"an int of {value.bit_length()} bits")
        if self.logprobs is not None and not is_int(self.logprobs, 0):
            raise ArgumentError("logprobs", "an int ≥ 0 or None", repr(self.logprobs))

    @property
    def ways(self) -> Ways:
        """What its tokens need."""
        ways = Ways.CHANGED if self.bias or self.presence or self.frequency else Ways(0)
        if not self.sampler.greedy:
            ways |= Ways.DRAWN
            if self.sampler.top_k is not None or self.sampler.top_p < 1:
                ways |= Ways.CUT
        return ways

    @staticmethod
    def of(ways: Ways) -> Chooser:
        """One that needs these: on a rank whose own tokens nobody takes."""
        sampler = Sampler(float(Ways.DRAWN in ways), top_p=0.5 if Ways.CUT in ways else 1.0)
        return Chooser(sampler, presence=float(Ways.CHANGED in ways))


SHARE = 2.0**40
"""The likeliest token's share, of which others' are whole parts: sums of whole numbers are the same in any order, so
what a row's `top_p` leaves out does not depend on how a device adds, which is by the number of rows. There is room for
2²² such shares twice."""


class Choosers:
    """The choosers of sequences that are decoded together, in rows of tensors that a CUDA graph may read.

    Args:
        device: where logits are. room: rows whose tensors stay where they are; more rows have them moved.
    """

    def __init__(self, device: torch.device, room: int = 0) -> None:
        self._device, self._places = device, torch.zeros(0, dtype=torch.int64, device=device)
        self._rows = {
            "drawn": torch.zeros(room, dtype=torch.bool, device=device),
            "temperature": torch.ones(room, 1, device=device),
            "last": torch.zeros(room, 1, dtype=torch.int64, device=device),  # of the top_k, counted from 0
            "top_p": torch.ones(room, 1, dtype=torch.float64, device=device),
            "stream": torch.zeros(room, 1, dtype=torch.int64, device=device),
            "presence": torch.zeros(room, 1, device=device),
            "frequency": torch.zeros(room, 1, device=device),
        }
        self._one = torch.ones(1, 1, device=device)

    def seat(self, row: int, chooser: Chooser, tokens: int) -> None:
        """Row `row` is this chooser's from now on, its logits of so many tokens; none was chosen so far."""
        if not len(self._places):
            self._places = places(tokens, self._device)
        room = len(self._rows["drawn"])
        if Ways.CHANGED in chooser.ways and "bias" not in self._rows:  # as much as logits: not made for nothing
            for name in ("bias", "counts"):
                self._rows[name] = torch.zeros(room, tokens, device=self._device)
        if row >= room:
            self._rows = {name: _grown(x, max(row + 1, 2 * room)) for name, x in self._rows.items()}
        sampler, seed = chooser.sampler, secrets.randbits(64) if chooser.seed is None else int(chooser.seed)
        values = {
            "drawn": not sampler.greedy,
            "temperature": 1.0 if sampler.greedy else _single(sampler.temperature),
            "last": min(sampler.top_k or tokens, tokens) - 1,
            "top_p": sampler.top_p if sampler.top_p < 1 else 2.0,  # beyond all of it: nothing is left out
            "stream": stream(seed),
            "presence": _single(chooser.presence),
            "frequency": _single(chooser.frequency),
        }
        for name, x in self._rows.items():
            x[row] = values.get(name, 0.0)
        if chooser.bias:
            at = torch.tensor([*chooser.bias], device=self._device)
            added = torch.tensor([float(x) for x in chooser.bias.values()], dtype=torch.float32, device=self._device)
            self._rows["bias"][row, at] = added

    def keep(self, rows: Sequence[int]) -> None:
        """These rows alone, in this order."""
        at = torch.tensor(rows, dtype=torch.int64, device=self._device)
        for x in self._rows.values():
            x[: len(rows)] = x[at]

    @torch.no_grad()
    def choose(self, logits: Tensor, ways: Ways, first: int = 0) -> Tensor:
        """The next token of each row from `first` on ``[N]``, after ``logits [N, vocab_size]``; −1 where the logits are
        not finite, or none can be drawn. They count as chosen. What is done is the same for all values.

        ways: what these rows need, and maybe more.
        """
        rows = {name: x[first : first + len(logits)] for name, x in self._rows.items()} if ways else {}
        wrong = (logits * 0).sum(-1) != 0  # in few launches: what is not finite is not a number times 0
        y = logits
        if Ways.CHANGED in ways:
            counts = rows["counts"]
            y = y.float() + rows["bias"] - rows["frequency"] * counts - rows["presence"] * (counts > 0)
        tokens = y.argmax(-1)
        if Ways.DRAWN in ways:
            drawn = _drawn(y.float() / rows["temperature"], rows, self._places, Ways.CUT in ways)
            tokens = torch.where(rows["drawn"], drawn, tokens)
            rows["stream"].add_(STRIDE)
        tokens = tokens.masked_fill(wrong, -1)
        if Ways.CHANGED in ways:
            counts.scatter_add_(1, tokens.clamp(min=0)[:, None], self._one.expand(len(tokens), 1))
        return tokens


def _drawn(y: Tensor, rows: Mapping[str, Tensor], places: Tensor, cut: bool) -> Tensor:
    """The tokens drawn of ``y [N, V]``, logits by temperatures; −1 where none can be."""
    most = y.amax(-1, keepdim=True)
    out = _left_out(y, most, rows) if cut else None
    if by_kernel(y):
        from .draw_kernel import draw

        return draw(y, most, rows["stream"], out)
    weights = (y - most).exp()
    if out is not None:
        weights = weights.masked_fill_(out, 0)
    least = weights.div_(minus_exponential(rows["stream"], places)).min(-1)  # by −E: what is largest by E
    return torch.where(least.values < 0, least.indices, -1)  # the likeliest token's is, unless there is no likeliest


def by_kernel(y: Tensor) -> bool:
    """Whether one launch draws of ``y [N, V]``."""
    return y.is_cuda and triton_installed()


def _left_out(y: Tensor, most: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """What is not drawn of ``y [N, V]``: what is less than the last of `top_k`, and of the others, the likeliest first
    and of equals the first token, those behind so many that have `top_p` together."""
    ordered, order = y.sort(dim=-1, descending=True, stable=True)
    behind = ordered < ordered.gather(1, rows["last"])
    shares = (ordered - most).exp_().mul_(SHARE).masked_fill_(behind, 0).long()
    upto = shares.cumsum(-1)
    enough = (upto[:, -1:] * rows["top_p"]).ceil().long()
    behind |= upto - shares >= enough
    return torch.empty_like(behind).scatter_(1, order, behind)


def _single(x: float) -> float:
    """A number as fp32 has it: infinite, where it is too large."""
    return float(torch.tensor(float(x), dtype=torch.float32, device="cpu"))


def _grown(x: Tensor, rows: int) -> Tensor:
    """The same and rows of zeros behind, `rows` in all."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def told(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """What a model said of ``tokens [N]`` with ``logits [N, vocab_size]``: each token's log-probability, those of the
    `top` likeliest and which these are, fp64 ``[N, 1 + 2 · top]``, as `said` reads it."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(top, logits.shape[-1]))
    own = logprobs.gather(1, tokens.clamp(min=0)[:, None])
    return torch.cat([x.double() for x in (own, best.values, best.indices)], 1)


def said(row: Sequence[float] | None, top: int | None) -> Said | None:
    """What a row of `told` says to who asks for so many of the likeliest; None, where nothing is asked for."""
    if row is None or top is None:
        return None
    most = len(row) // 2
    return Said(row[0], [(int(token), value) for token, value in zip(row[1 + most :], row[1 : 1 + min(top, most)])])
