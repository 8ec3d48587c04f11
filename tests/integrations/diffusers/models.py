"""Tiny random transformers of Diffusers, one or more a plan: all of them, and how close results are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .control_models import CONTROL_CASES, ROUNDED_CONTROL
from .cross_models import CROSS_CASES
from .inputs import Case
from .joint_models import JOINT_CASES
from .linear_models import LINEAR_CASES
from .streams_models import ROUNDED_STREAMS, STREAM_CASES

CASES: dict[str, Case] = LINEAR_CASES | JOINT_CASES | CROSS_CASES | CONTROL_CASES | STREAM_CASES

SINGLE = ("cosmos, learned",)
"""Cases whose models take nothing but fp32."""

ROUNDED = (
    "sana",
    "wan",
    "chronoedit",
    "anyflow",
    "flux3",
    "fibo 2",
    "skyreels",
    "easyanimate",
    "auraflow",
    "hunyuan dit",
    "stable audio",
    "lumina2",
    "krea2",
    "cosmos",
    "consisid",
    "lumina next",
    *ROUNDED_CONTROL,
    *ROUNDED_STREAMS,
)
"""Cases whose norms, steps or rotations are in fp32 whatever the model is in."""


def limits(name: str) -> tuple[float, float]:
    """Of a case's errors: the output's and the gradients'."""
    if name == "kandinsky5":  # rounds queries and keys to bf16, and so the gradients of each rank's tokens
        return 3e-6, 1e-2
    if name == "sana wm, softmax":  # its softmax attention, and that of cameras, is in bf16
        return 3e-3, 3e-2
    return (3e-6, 3e-5) if name.startswith(ROUNDED) else (1e-9, 1e-8)


def make(name: str) -> tuple[nn.Module, dict[str, object]]:
    """The model in fp64, every parameter drawn, and its inputs; the same on all ranks."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    model = model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if name in SINGLE:
        model = model.float()
        for n, x in inputs.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                inputs[n] = x.detach().float().requires_grad_(x.requires_grad)
    return model, inputs
