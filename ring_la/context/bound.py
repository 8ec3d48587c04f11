"""A model bound to a layout: it catches mistakes that no single call can know of.

    with layout.bind(model) as bound:
        bound.compare(x)                    # once, on a short sequence: whole and split, module by module
        out = model(layout.shard(x))        # every layer of it works on this split

What a call of one layer cannot see: that its caller forgot ``layout=``, that its tokens were cut by another layout of
the same length, that the ranks cut different sequences, that a module beside it mixes tokens with plain PyTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm import refusal
from ..errors import ArgumentError, RingLAError
from ..layout import WHOLE, Layout
from .agreed import AgreedLayout
from .arguments import describe

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far a token's results split and whole may be apart, as a share of their norm."""
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Bound:
    """A model whose calls work on one layout until `remove`, or the end of a ``with`` block.

    Within it

    - modules of the model that take a ``layout`` get this one where their caller gives none; another one, or None given
      by name, is refused;
    - the model refuses the whole sequence, tokens of another number, and tensors known to be split by another layout;
    - all ranks must have cut the same sequence: what ``layout.shard`` gives meanwhile is compared when it comes in.

    The backward pass belongs within it, too, where anything is recomputed. Each call of the model compares ranks by the
    job's store, and `shard` reads its tensor, so it costs a little of the host's time: for a first run, or for all of
    one whose steps are long.
    """

    def __init__(self, layout: AgreedLayout, model: nn.Module) -> None:
        self.layout, self.model = layout, model
        self._handles: list[RemovableHandle] = []
        self._split = True
        self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True))
        for path, module in model.named_modules():
            place = _places(module).get("layout")
            if place is not None:
                before = _named(self._lay, path, place)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            if place is not None or module is model:
                self._handles.append(module.register_forward_hook(self._mark))
        layout.bindings += 1

    def __enter__(self) -> Bound:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """The model as it was. A second time does nothing."""
        if self._handles:
            self.layout.bindings -= 1
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def compare(self, *args: Any, **keywords: Any) -> None:
        """Call the model on a whole sequence, on each rank by itself, and split, and compare what its modules give.

        Collective; without gradients, in evaluation mode. For a short sequence: every rank holds all of it.

        Args:
            args, keywords: the model's, whole and the same on every rank. Tensors with ``seq_len`` along dimension 1
                are cut for the split call.

        Raises:
            ArgumentError: on every rank, naming the first module whose results differ.
        """
        modes = [(m, m.training) for m in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                whole = self._results(args, keywords, split=False)
                cut = [self._cut(x) for x in args], {name: self._cut(x) for name, x in keywords.items()}
                parts = self._results(*cut, split=True)
        finally:
            for module, training in modes:
                module.training = training
        self._compare(whole, parts)

    # -- hooks ---------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """What comes into the model, on all ranks."""
        layout = self.layout
        if not self._split or torch.compiler.is_compiling():
            return
        error, report = None, {"call": type(module).__name__}
        try:
            for name, x in self._tensors(module, args, keywords):
                layout.cp.marks.require(name, x, layout)
                mark = layout.cp.marks.get(x)
                if mark is not None and mark.whole is not None:
                    report[f"what {name} was cut from"] = f"{mark.whole & 0xFFFFFFFF:08x}"
            self._require_local(module, args, keywords)
        except RingLAError as e:
            error = e
        if layout.cp.validate != "never":
            hint = "All ranks of a group give layout.shard the same whole sequence: they share a seed and a sampler"
            what = f"the inputs of {type(module).__name__}"
            said = f"refused: {error}" if error else report
            layout.cp.comm.agreement.agree(what, said, hint, refusal(error))
        if error is not None:
            raise error

    def _lay(
        self, path: str, place: int, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Inputs | None:
        """The layout of a module's call."""
        given = args[place] if len(args) > place else keywords.get("layout", self.layout)
        if self._split and not torch.compiler.is_compiling():
            self._check(path, module, given, args, keywords)
        if "layout" in keywords or len(args) > place:
            return None
        if self._split:
            return args, keywords | {"layout": self.layout}
        packed = self.layout.packed and "cu_seqlens" in _places(module) and "cu_seqlens" not in keywords
        if not packed:
            return None
        offsets = torch.tensor(self.layout.cu_seqlens, dtype=torch.int32, device=self.layout.cp.device)
        return args, keywords | {"cu_seqlens": offsets}

    def _check(
        self, path: str, module: nn.Module, given: object, args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        layout, where = self.layout, f"{path or 'the model'} ({type(module).__name__})"
        try:
            if given is not layout and not (given == layout and getattr(given, "cp", None) is layout.cp):
                got = f"that of {describe(given)}" if isinstance(given, Layout) else repr(given)
                expected = f"the layout that the model is bound to, {describe(layout)}, for {where}"
                raise ArgumentError("layout", expected, got)
            for name, x in self._tensors(module, args, keywords):
                layout.cp.marks.require(f"{name} of {where}", x, layout)
        except RingLAError as error:
            layout.agree(where, None, error)  # raises, on every rank

    def _mark(self, module: nn.Module, args: object, output: object) -> None:
        """Note the split of what a module gives."""
        if self._split:
            for x in _results(output, self.layout.local_length):
                self.layout.cp.marks.put(x, self.layout)

    # -- checks --------------------------------------------------------------------------------------------

    def _tensors(
        self, module: nn.Module, args: Iterable[Any], keywords: Mapping[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """A call's tensors that may hold tokens, by name."""
        names = list(inspect.signature(module.forward).parameters)
        for i, x in enumerate(args):
            if isinstance(x, Tensor) and x.dim() > 1:
                yield (names[i] if i < len(names) else f"argument {i}"), x
        for name, x in keywords.items():
            if isinstance(x, Tensor) and x.dim() > 1:
                yield name, x

    def _require_local(self, module: nn.Module, args: Iterable[Any], keywords: Mapping[str, Any]) -> None:
        here, everything = self.layout.local_length, self.layout.seq_len
        found = {name: x.shape[1] for name, x in self._tensors(module, args, keywords)}
        for name, tokens in found.items():
            if tokens == everything != here:
                raise ArgumentError(name, "this rank's tokens for a model bound to a layout", f"all {tokens}", WHOLE)
        if found and here not in found.values():
            name, tokens = next(iter(found.items()))
            raise ArgumentError(name, f"{here} tokens along dimension 1, this rank's under {self.layout!r}", tokens)

    # -- whole and split -----------------------------------------------------------------------------------

    def _cut(self, x: object) -> object:
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == self.layout.seq_len:
            return self.layout.shard(x)
        return x

    def _results(self, args: Iterable[Any], keywords: Mapping[str, Any], *, split: bool) -> list[tuple[str, Tensor]]:
        """This rank's tokens of what each module gives, in the order in which they finish."""
        length = self.layout.local_length if split else self.layout.seq_len
        found: list[tuple[str, Tensor]] = []

        def keep(path: str, module: nn.Module, args: object, output: object) -> None:
            for x in _results(output, length):
                if x.is_floating_point():
                    found.append((path, x.clone() if split else self.layout.shard(x)))

        handles = [m.register_forward_hook(_named(keep, path)) for path, m in self.model.named_modules()]
        try:
            with self._working(split):
                self.model(*args, **keywords)
        finally:
            for handle in handles:
                handle.remove()
        return found

    @contextmanager
    def _working(self, split: bool) -> Iterator[None]:
        before, self._split = self._split, split
        try:
            yield
        finally:
            self._split = before

    def _compare(self, whole: list[tuple[str, Tensor]], parts: list[tuple[str, Tensor]]) -> None:
        """Refuse the first module that gives something else, the same one on every rank."""
        first, apart = len(whole), 0.0
        for i, ((path, a), (again, b)) in enumerate(zip(whole, parts)):
            apart = 1.0 if path != again or a.shape != b.shape else _distance(a, b)
            if apart > TOLERANCE.get(b.dtype, 3e-2):
                first = i
                break
        worst = min(((int(n), float(d)) for n, _, d in (t.partition(" ") for t in self._tell(f"{first} {apart}"))))
        if worst[0] == len(whole) == len(parts):
            return
        paths = [path for path, _ in whole] or [path for path, _ in parts] or [""]
        path = paths[min(worst[0], len(paths) - 1)]
        kind = type(self.model.get_submodule(path)).__name__
        expected = "the same results split and whole"
        got = f"{path} ({kind}), the first whose results differ, by {worst[1]:.1e} of their norm" if path else kind
        hint = "It mixes tokens without the layout, counts positions by the place in the tensor, or drops at random"
        raise ArgumentError("model", expected, got, hint)

    def _tell(self, found: str) -> list[str]:
        return self.layout.cp.comm.agreement.tell(found) if self.layout.world_size > 1 else [found]


def _places(module: nn.Module) -> dict[str, int]:
    """Where the arguments of a module's call stand, by name; those given by name alone stand behind all others."""
    places: dict[str, int] = {}
    for i, p in enumerate(inspect.signature(module.forward).parameters.values()):
        if p.kind is inspect.Parameter.KEYWORD_ONLY:
            places[p.name] = 1000
        elif p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            places[p.name] = i
    return places


def _named(hook: Callable[..., Any], *first: object) -> Callable[..., Any]:
    """A hook that is told these first."""
    return lambda *rest: hook(*first, *rest)


def _results(output: object, tokens: int) -> Iterator[Tensor]:
    """The tensors with so many tokens in what a module returned."""
    if isinstance(output, Tensor):
        if output.dim() > 1 and output.shape[1] == tokens:
            yield output
    elif isinstance(output, Mapping):
        yield from _results(tuple(output.values()), tokens)
    elif isinstance(output, (tuple, list)):
        for x in output:
            if isinstance(x, Tensor):
                yield from _results(x, tokens)


def _distance(a: Tensor, b: Tensor) -> float:
    """How far the token that is furthest off is, as a share of its norm, or of the mean norm where that is larger;
    infinite where it is no number."""
    if not a.numel():
        return 0.0
    a, b = (x.double().transpose(0, 1).flatten(1) for x in (a, b))
    norm = a.norm(dim=1)
    apart = float(((a - b).norm(dim=1) / norm.clamp_min(norm.mean().clamp_min(1e-12))).max())
    return apart if apart == apart else float("inf")
