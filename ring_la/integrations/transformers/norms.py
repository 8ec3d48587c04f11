"""RMS norms of Transformers' models in one launch where a GPU is: theirs are some ten operations in fp32.

    x / rms(x) ⊙ scale,  ⊙ silu(gate) or sigmoid(gate) where there is one,  scale = weight or 1 + weight

Whether a norm is one of these is not read but measured: it is put to random vectors and weights in fp32, and what is
not the same to rounding stays the library's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ...kernels.fused.operator import fused
from ...kernels.fused.rms_norm import rms_norm

CLOSE = 1e-6
"""How far a norm may be from ours, relative to its size, and still be rounding."""
PROBES = 4
"""Random vectors that a norm is tried on."""


class Form(NamedTuple):
    """A norm as ours computes it.

    Attributes:
        names: of the arguments of the library's: what is normed, and the gate where it takes one.
        one_more: the scale is 1 + weight, not the weight.
        silu: of the gate; False: sigmoid.
    """

    names: tuple[str, ...]
    one_more: bool
    silu: bool
    eps: float

    def scale(self, weight: Tensor) -> Tensor:
        """What the normed vector is multiplied by, ``[D]``."""
        return 1 + weight.float() if self.one_more else weight

    def __call__(self, x: Tensor, scale: Tensor, gate: Tensor | None = None) -> Tensor:
        gate = None if gate is None else gate.contiguous()
        return rms_norm(x.contiguous(), scale, gate, silu=self.silu, eps=self.eps)


def form_of(module: nn.Module) -> Form | None:
    """The form of a module that is seen to be such a norm; None: it is none. Its own weights are not read."""
    eps = _eps(module)
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if "Norm" not in type(module).__name__ or not isinstance(eps, float) or len(names) not in (1, 2):
        return None
    if [n for n, _ in module.named_parameters()] != ["weight"] or any(True for _ in module.buffers()):
        return None
    width = module.get_parameter("weight").shape
    if len(width) != 1:
        return None
    dice = torch.Generator().manual_seed(0)
    shapes = [width, *[(PROBES, *width)] * len(names)]
    weight, *given = (torch.randn(shape, generator=dice, device="cpu", dtype=torch.float32) for shape in shapes)
    try:
        with torch.no_grad():
            want = functional_call(module, {"weight": weight}, tuple(given))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # it takes something else
    for one_more, silu in product((False, True), (True, False)[: len(names)]):
        form = Form(names, one_more, silu, eps)
        got = form(given[0], form.scale(weight), *given[1:])
        if isinstance(want, Tensor) and want.shape == got.shape and (got - want).norm() <= CLOSE * want.norm():
            return form
    return None


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


class NormForms:
    """The forms of a model's norms: those of one class, width and eps are tried once."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Form | None] = {}

    def of(self, module: nn.Module) -> Form | None:
        weight, eps = (
            module._parameters.get("weight"),
            getattr(module, "variance_epsilon", getattr(module, "eps", None)),
        )
        key = (type(module), None if weight is None else weight.shape, eps)
        if key not in self._found:
            self._found[key] = form_of(module)
        return self._found[key]


def norm_forward(kind: type, form: Form) -> Callable[..., Tensor]:
    """The forward of modules of a class whose form is known: ours on a GPU, else the library's."""
    own: Any = kind.forward  # type: ignore[attr-defined]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **keywords: Any) -> Tensor:
        given = dict(zip(form.names, args)) | keywords
        x, *gate = (given.get(name) for name in form.names)
        if not takes(form, self.weight, x, *gate):
            return own(self, *args, **keywords)
        return form(x, form.scale(self.weight), *gate)

    return forward


def takes(form: Form, weight: Any, x: Any, gate: Any = None) -> bool:
    """Whether ours gives what the library's would, in its dtype, and in fewer launches."""
    tensors = (x, weight, gate)[: 1 + len(form.names)]
    if any(isinstance(t, DTensor) or not isinstance(t, Tensor) for t in tensors):
        return False
    return fused(x) and (form.one_more or weight.dtype == x.dtype) and (gate is None or gate.shape == x.shape)
