"""Where the first NaN comes from: the operator, the layer, the rank, on the way forward or backward.

    with ring_la.find_nans(model, cp):
        model.loss(ids, layout=layout).backward()

Inside the block every result of PyTorch's operators is looked at, until the first NaN. On the way back the layer of an
operator is found by the number that autograd gave its node on the way forward. At the end of the block ranks tell each
other what they saw; they make the same calls, so what comes first is the one with the fewest calls before it, and among
ranks in the same call the one whose inputs were finite: the others received it.
"""

from __future__ import annotations

import json
import sys
import types
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .context import ContextParallel
from .errors import ArgumentError, NotFiniteError

UNSET = ("empty", "new_empty", "c10d", "_c10d")
"""Operators whose results are not numbers yet: memory not written to, messages under way."""
ABOVE = (
    "ring_la.nn",
    "ring_la.models",
    "ring_la.inference",
    "ring_la.training",
    "ring_la.integrations",
    "ring_la.nans",
    "ring_la.blockwise",
)
"""Modules whose functions are layers and what is made of them, not operators."""


@dataclass(frozen=True)
class FirstNaN:
    """The first NaN, or infinity, of a block.

    Attributes:
        rank: in the group. direction: "forward" or "backward".
        layer: the name of the innermost module in which it came up; "": outside all of them.
        op: ring_la's operator, "" where it is none; step: PyTorch's operator or autograd's node in it.
        kind: "NaN", or "infinity" in what a layer gives or in a parameter's gradient.
        shape, count, index: of the tensor, how many there are, where the first one is.
        arrived: whether it came with the inputs of that operator, from before the block or from another rank.
        calls: operators and layers entered before.
    """

    rank: int
    direction: str
    layer: str
    op: str
    step: str
    kind: str
    shape: list[int]
    count: int
    index: list[int]
    arrived: bool
    calls: int

    def __str__(self) -> str:
        where = f"in {self.op} ({self.step})" if self.op else f"in {self.step}"
        layer = f"layer {self.layer}" if self.layer else "outside the model's layers"
        how = "came with its inputs" if self.arrived else "of finite inputs"
        of = f"{self.count} of the numbers {self.shape}, the first at {self.index}, {how}"
        return f"the first {self.kind} is on rank {self.rank}, {self.direction}, {layer}, {where}: {of}"


def find_nans(model: nn.Module, cp: ContextParallel | None = None) -> NaNFinder:
    """A context manager that names the first NaN inside it, by operator, layer and rank, forward and backward.

    It looks at every result, so steps take several times as long; use it to find out, not in every step. Infinities are
    told where layers give them and in parameters' gradients (inside operators −∞ is a mask). Eager models: results
    within compiled code are not seen, those of kernels and custom operators as a whole.

    Args:
        model: whose layers are named.
        cp: every rank enters and leaves the block, and all get the same error; None: this process alone.

    Returns:
        What ``with`` takes; its `first` is the `FirstNaN`, or None.

    Raises:
        ArgumentError: no module, no ContextParallel. NotFiniteError: at the end of the block; its `first` as above.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", "a torch.nn.Module", type(model).__name__)
    if cp is not None and not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel or None", type(cp).__name__)
    return NaNFinder(model, cp)


class NaNFinder(TorchDispatchMode):
    """What `find_nans` returns. Attributes: first: the `FirstNaN` of all ranks, set at the end of the block; None."""

    def __init__(self, model: nn.Module, cp: ContextParallel | None) -> None:
        super().__init__()
        self.first: FirstNaN | None = None
        self._model, self._cp = model, cp
        self._names = {id(p): n for n, p in model.named_parameters()}
        self._inside: list[str] = []
        self._places: list[tuple[str, str]] = []  # layer and operator of each stretch of the way forward,
        self._ends: list[int] = []  # and autograd's count at its end
        self._at, self._calls = ("", ""), 0

    def __enter__(self) -> NaNFinder:
        self._hooks = [h for name, module in self._model.named_modules() if name for h in self._watch(name, module)]
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        if kind is not None:  # ranks may not come to this point together
            return
        if self._cp is not None and self._cp.size > 1:
            said = [json.loads(text) for text in self._cp.comm.agreement.tell(json.dumps(_plain(self.first)))]
            found = [FirstNaN(**one) for one in said if one]
            self.first = min(found, key=lambda f: (f.calls, f.arrived, f.rank), default=None)
        if self.first is not None:
            raise NotFiniteError(self.first)

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Hooks that keep the names of the layers a call is in."""

        def enter(*_: Any) -> None:
            self._inside.append(name)

        def leave(_module: nn.Module, _given: Any, out: Any) -> None:
            if self.first is None:
                for x in _floats(out):
                    self._see(x, "infinity", "forward", name, "", "its output", False)
            self._inside.pop()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.first is not None:
            return out
        node = torch._C._current_autograd_node()
        layer, op = self._forward() if node is None else self._backward(node)
        if (layer, op) != self._at:
            self._at, self._calls = (layer, op), self._calls + 1
        name = str(func)
        if func.is_view or name.removeprefix("aten.").startswith(UNSET):
            return out
        direction = "forward" if node is None else "backward"
        step = name.removesuffix(".default") if node is None else f"{node.name()}, {name.removesuffix('.default')}"
        for x in _floats(out):
            if not _has(x, "NaN"):
                continue
            overwritten = func._schema.is_mutable
            arrived = any(_has(y, "NaN") for y in _floats([args[1:] if overwritten else args, kwargs]))
            self._see(x, "NaN", direction, layer, op, step, arrived)
            return out
        if node is not None and (own := self._names.get(id(getattr(node, "variable", None)))) is not None:
            for x in _floats(out):
                self._see(x, "infinity", direction, layer, op, f"the gradient of {own}", False)
        return out

    def _forward(self) -> tuple[str, str]:
        """Layer and operator of now; kept for the nodes that autograd makes meanwhile."""
        at = (self._inside[-1] if self._inside else "", _operator(sys._getframe(2)))
        count = torch.autograd._get_sequence_nr()
        if self._places and self._places[-1] == at:
            self._ends[-1] = count
        else:
            self._places.append(at)
            self._ends.append(count)
        return at

    def _backward(self, node: Any) -> tuple[str, str]:
        """Layer and operator in which a node was made."""
        own = self._names.get(id(getattr(node, "variable", None)))
        if own is not None:
            return own.rpartition(".")[0], ""
        if self._inside:  # a layer is recomputed
            return self._forward()
        i = bisect_left(self._ends, node._sequence_nr() + 1)
        return self._places[i] if i < len(self._places) else ("", "")

    def _see(
        self, x: Tensor, kind: str, direction: str, layer: str, op: str, step: str, arrived: bool
    ) -> None:  # fmt: skip
        """Keep the first of this kind in x, if there is one."""
        if self.first is not None or not _has(x, kind):
            return
        bad = x.isnan() if kind == "NaN" else x.isinf()
        rank = 0 if self._cp is None else self._cp.rank
        index = bad.nonzero()[0].tolist()
        self.first = FirstNaN(
            rank, direction, layer, op, step, kind, list(x.shape), int(bad.sum()), index, arrived, self._calls
        )


def _operator(frame: types.FrameType | None) -> str:
    """The outermost function of ring_la in a stack that is an operator of it; "": none is."""
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("ring_la.") and not module.startswith(ABOVE):
            name = frame.f_code.co_name
            definition = frame.f_locals.get("definition") if name == "function" else None
            found = name if definition is None else definition.name
        frame = frame.f_back
    return found


def _floats(x: Any) -> Iterator[Tensor]:
    """The tensors of numbers in a value, of a sharded one this rank's part."""
    for t in tree_leaves(x):
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.device.type != "meta":
            yield getattr(t, "_local_tensor", t).detach()


def _has(x: Tensor, kind: str) -> bool:
    return bool((x.isnan() if kind == "NaN" else x.isinf()).any())


def _plain(first: FirstNaN | None) -> dict[str, Any] | None:
    return None if first is None else asdict(first)
