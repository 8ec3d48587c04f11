"""The cost model behind ``scan="auto"``: what a group's messages and a rank's maps cost, measured once.

A message of n bytes costs α + n/β seconds. Each strategy says what is on its critical path (`Scan.cost`): so many
messages of a pattern, so many maps applied or composed; and what its host launches, for on a GPU the host is often what
the exchange waits for. `CostModel.measure` finds α and β of each pattern from two sizes, the device's speed at maps and
the host's at launching; the slowest rank's figures are used by all ranks, so that all choose alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..algebra import Affine
from ..comm import Group
from . import mailbox_ring
from .all_gather import AllGather, pack, unpack
from .all_to_all import AllToAll
from .chain import Chain
from .doubling import Doubling
from .ring import PIPELINE_BLOCKS, Ring
from .strategy import Cost, Link, Scan

STRATEGIES: dict[str, Scan] = {
    s.name: s for s in (Ring("ring"), Ring("pipelined", PIPELINE_BLOCKS), AllGather(), Doubling(), AllToAll())
}
"""Every scan strategy by name; tests and ``scan="auto"`` go through this table."""

SMALL, LARGE = 16 * 1024, {"cpu": 2 * 2**20, "cuda": 16 * 2**20}
SWEEP, PATIENCE, MOST = 0.2, 0.7, 30
"""Seconds all probes may take once, seconds to repeat them for, and how often at most."""
QUANTILE = 25
"""Which of the repetitions counts, %: not the middle, for other work only ever adds time."""


@dataclass(frozen=True)
class Line:
    """Seconds of something of a size: `alpha` at size 0 and one more for every `beta` of it (bytes, operations)."""

    alpha: float
    beta: float

    def __call__(self, size: float) -> float:
        return self.alpha + size / self.beta

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Line:
        """The line through two points (size, seconds); a tenth of the large one's time at least is due to its size."""
        beta = (large[0] - small[0]) / max(large[1] - small[1], large[1] / 10, 1e-9)
        return cls(max(small[1] - small[0] / beta, 1e-7), beta)


@dataclass(frozen=True)
class CostModel:
    """Predicted seconds of each strategy on one group.

    Attributes:
        hop, swap, gather, exchange: messages of each pattern (`Messages`), over bytes received.
        add: an elementwise map applied to a state, over the state's bytes.
        matmul: a dense map applied, over floating-point operations.
        link: one link of a ring by mailboxes, over a state's bytes; None where messages go another way.
        post, launch: seconds the host takes to launch a message, and a tensor operation with its views, where a device
            runs beside it; else 0, for the above hold them.
    """

    hop: Line
    swap: Line
    gather: Line
    exchange: Line
    add: Line
    matmul: Line
    post: float = 0.0
    launch: float = 0.0
    link: Line | None = None

    @classmethod
    def measure(cls, group: Group) -> CostModel:
        """Measure `group`; collective, well under two seconds on one host."""
        scale = 1 / 8
        for _ in range(2):  # once to open connections and to learn which sizes this group can afford
            probes = _messages(group, scale) | _maps(group.device)
            start = time.perf_counter()
            first = _sweep(probes, group)
            lasted = _slowest([time.perf_counter() - start], group)[0]
            scale = min(1.0, SWEEP / 8 / lasted)
        sweeps = [first, *(_sweep(probes, group) for _ in range(min(MOST, int(PATIENCE / lasted))))]
        middle = iter(_slowest([sorted(column)[QUANTILE * len(column) // 100] for column in zip(*sweeps)], group))
        lines, posting = {}, {}
        for name, probe in probes.items():
            (small, posting[name]), (large, _) = ((next(middle), next(middle)) for _ in range(2))
            lines[name] = Line.through((probe.small, small), (probe.large, large))
        del lines["launch"]
        return cls(**lines, post=posting["gather"], launch=posting["launch"])

    def to_dict(self) -> dict[str, list[float] | float | None]:
        """Plain values, for a file: (alpha, beta) of the lines."""
        return {n: [x.alpha, x.beta] if isinstance(x, Line) else x for n, x in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[float] | float | None]) -> CostModel:
        """The inverse of `to_dict`."""
        fields: dict[str, Any] = {n: Line(*x) if isinstance(x, Sequence) else x for n, x in values.items()}
        return cls(**fields)

    def seconds(self, cost: Cost, like: Affine) -> float:
        """Seconds of an exchange of this cost, for maps like `like`."""
        messages = sum(m.count * getattr(self, m.pattern)(m.size) for m in cost.messages)
        heads, (k, v) = like.b.shape[:-2].numel(), like.b.shape[-2:]
        apply, compose = self.add(like.b.nbytes), 0.0
        if like.kind == "dense":
            apply += self.matmul(2 * heads * k * k * v)
            compose = self.matmul(2 * heads * k * k * k)
        messages += cost.copied / self.add.beta
        host = cost.posted * self.post + cost.operations * self.launch
        return messages + cost.applied * apply + cost.composed * (apply + compose) + host

    def predict(self, chain: Chain, like: Affine, backward: bool = False) -> dict[str, float]:
        """Seconds each strategy takes to exchange maps like `like` over `chain`; `backward`: and their gradients."""
        out = {}
        for name, strategy in STRATEGIES.items():
            how = {"mailboxes": True} if name == "ring" and self.link and mailbox_ring.fits(like) else {}
            costs = [strategy.cost(chain, like, **how)]
            if backward:
                costs.append(strategy.cost_back(chain, like, **how))
            out[name] = sum(self.seconds(cost, like) for cost in costs)
        return out

    def best(self, chain: Chain, like: Affine) -> str:
        """The strategy with the lowest prediction, forward and back: one strategy does both."""
        predictions = self.predict(chain, like, backward=True)
        return min(predictions, key=predictions.__getitem__)


class Probe(NamedTuple):
    """What to time at two sizes; `share` of the time belongs to one message or map."""

    run: Callable[[int], None]
    small: int
    large: int
    share: float = 1.0


def _messages(group: Group, scale: float) -> dict[str, Probe]:
    """One message of each pattern, by the bytes a rank receives; `scale` makes the large ones smaller."""
    P, rank, device = group.size, group.rank, group.device
    right, left = (rank + 1) % P, (rank - 1) % P
    large = max(4 * SMALL, int(LARGE[device.type] * scale))

    def block(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def chain(size: int) -> None:
        """From the first rank to the last, each sending when it has received."""
        x = block(size)
        if rank > 0:
            x = group.recv(x.shape, x.dtype, x.device, left).wait()
        if rank < P - 1:
            group.send(x, right).wait()

    def swap(size: int) -> None:
        group.exchange({right: block(size)}, {left: block(size)}).wait()

    def gather(size: int) -> None:
        group.all_gather(block(size // (P - 1))).wait()

    def exchange(size: int) -> None:
        group.all_to_all(block(size // (P - 1) * P).view(P, -1)).wait()

    def links(size: int) -> None:
        b = torch.empty(1, size // 2**14, 64, 64, device=device)
        line, like = Chain.line(P), Affine("identity", None, b)
        STRATEGIES["ring"].start(line, [Link(like)], like, group).wait()

    probes = {} if group.mailboxes is None else {"link": Probe(links, SMALL, large, 1 / (P - 1))}
    return probes | {
        "hop": Probe(chain, SMALL, large, 1 / (P - 1)),
        "swap": Probe(swap, SMALL, large),
        "gather": Probe(gather, SMALL, large),
        "exchange": Probe(exchange, SMALL, large),
    }


def _maps(device: torch.device) -> dict[str, Probe]:
    """A map applied to a state: elementwise by its bytes, dense by its operations; and what launching one takes."""
    width, times, large = 128, 4, {"cpu": 8, "cuda": 64}[device.type]
    one = Affine("scalar", torch.ones(1, device=device), torch.ones(1, 8, 8, device=device))

    def add(size: int) -> None:
        x = torch.ones(size // 4, device=device)
        for _ in range(times):
            x = x * 0.5 + x

    def matmul(size: int) -> None:
        x = torch.ones(size // (2 * width**3), width, width, device=device)
        for _ in range(times):
            x = x @ x

    def launch(size: int) -> None:
        for _ in range(size):
            unpack(pack([one], 1, one), one)[0](one.b)

    return {
        "add": Probe(add, SMALL, LARGE[device.type], 1 / times),
        "matmul": Probe(matmul, 2 * width**3, 2 * width**3 * large, 1 / times),
        "launch": Probe(launch, 4, 8, 1 / 8),
    }


def _sweep(probes: dict[str, Probe], group: Group) -> list[float]:
    """All probes once, small and large: what the device takes beyond the host, and what the host takes to launch it.

    In turns, so that what else the machine does hits all alike. On a CPU the host's time is 0.
    """
    times = []
    for probe in probes.values():
        for size in (probe.small, probe.large):
            host, device = _seconds(probe.run, size, group)
            times += [device * probe.share, host * probe.share]
    return times


def _seconds(run: Callable[[int], None], size: int, group: Group) -> tuple[float, float]:
    """Seconds of one call on this rank, from when all ranks are there: until it returns, and from then on."""
    group.all_reduce(torch.zeros(1, device=group.device)).wait()
    if not group.on_cuda:
        start = time.perf_counter()
        run(size)
        return 0.0, time.perf_counter() - start
    torch.cuda.synchronize(group.device)
    start = time.perf_counter()
    run(size)
    returned = time.perf_counter()
    torch.cuda.synchronize(group.device)
    return returned - start, time.perf_counter() - returned


def _slowest(seconds: list[float], group: Group) -> list[float]:
    """Of each figure the largest of all ranks."""
    figures = torch.tensor(seconds, dtype=torch.float64, device=group.device)
    return group.all_reduce(figures, op=dist.ReduceOp.MAX).wait().tolist()
