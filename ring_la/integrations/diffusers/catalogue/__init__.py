"""The plans of Diffusers' models. A new one is an entry here; its test is a case of tests/integrations/diffusers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ....errors import UnsupportedError
from ..plans import ModelPlan
from .control import CONTROL
from .cross import CROSS
from .flux import FLUXES
from .joint import JOINT
from .linear import LINEAR
from .refined import REFINED
from .several import SEVERAL

PLANS: Mapping[str, ModelPlan] = FLUXES | JOINT | REFINED | CROSS | SEVERAL | LINEAR | CONTROL  # type: ignore[operator]
"""By the name of the model's class."""


def find_plan(model: nn.Module) -> ModelPlan:
    """The entry of a model.

    Raises:
        UnsupportedError: it has none.
    """
    plan = PLANS.get(type(model).__name__)
    if plan is None or not type(model).__module__.startswith("diffusers."):
        expected = f"one of {', '.join(PLANS)}"
        compiled = hasattr(model, "_orig_mod")
        hint = "Compile it afterwards" if compiled else "Give a plan of its own (plan=)"
        raise UnsupportedError("transformer", expected, type(model).__name__, hint)
    return plan
