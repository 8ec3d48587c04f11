"""Bytes that a recurrence's launches name: `TRITON_INTERPRET=1 python -m benchmarks.tuning.traffic`, without a GPU.

For each launch of a forward that keeps what its backward wants, and of that backward, the sizes of the tensors it is
given, per token and value head; under each recurrence the floor that ``ring-la bench ops`` takes. Of `FORWARD` a
forward alone. Nothing is computed.
A tensor of which a kernel reads little (of G, the running decays of channels, the passes over spans read a row a chunk)
counts whole, one that is read twice once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ring_la.algebra import Rule
from ring_la.kernels.families import recurrence
from ring_la.kernels.other_side import OtherSide
from ring_la.kernels.protocol import Backward, Inputs, OutputUse
from ring_la.kernels.spans import table
from tests.support.launches import launched_by

T = 8192
RULES = {  # rule, value heads, key heads, K, V, and bytes of weighed keys and queries that may be kept
    "gla": ("additive_diagonal", 4, 4, 128, 128, 0),
    "gla, kept": ("additive_diagonal", 4, 4, 128, 128, 2**26),
    "rwkv7": ("dplr_diagonal", 4, 4, 128, 128, 0),
    "rwkv7, kept": ("dplr_diagonal", 4, 4, 128, 128, 2**26),
    "mamba2": ("additive_scalar", 20, 2, 128, 64, 0),
    "simple_gla": ("additive_scalar", 4, 4, 128, 128, 0),
}
FORWARD = {  # rule, heads, K and V
    "comba": ("erase_scalar", 32, 128, 128),
    "slots' scores": ("additive_diagonal_values", 32, 64, 128),
    "slots' outputs": ("additive_diagonal", 32, 64, 128),
}


def inputs(rule: Rule, H: int, HK: int, K: int, V: int) -> Inputs:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(1, T, *shape, dtype=torch.bfloat16)

    g = zeros(H, K) if rule.decay == "diagonal" else zeros(H).float()
    extra = {n: zeros(H, K) for n in {"dplr": "ab", "erase": "a"}.get(rule.write, "")}
    beta = zeros(H) if rule.write == "erase" else None
    return Inputs(zeros(HK, V if rule.reads == "values" else K), zeros(HK, K), zeros(H, V), g, beta, **extra)


def whole(rule: Rule, x: Inputs) -> None:
    """A forward and its backward."""
    saved = recurrence(rule, x, None, 1.0, OutputUse(saved=True, final=False)).output(None).saved
    recurrence(rule, x, None, 1.0).gradients(Backward(None, torch.zeros_like(x.v), saved), None)


def forward(rule: Rule, x: Inputs) -> None:
    """A forward alone."""
    use = OutputUse(final=False)
    if rule.reads == "values":
        OtherSide(lambda inputs: recurrence(rule.by_keys, inputs, None, 1.0), x, None, use.final).output(None)
    else:
        recurrence(rule, x, None, 1.0, use).output(None)


def launches(call: Callable[[Rule, Inputs], None], rule: Rule, x: Inputs) -> list[tuple[str, list[int]]]:
    """(kernel, bytes of its tensors) of a call."""
    found: list[tuple[str, list[int]]] = []

    def noted(kernel: Any, grid: tuple, *args: Any, **constants: Any) -> None:
        tensors = [t.base if isinstance(t, TensorDescriptor) else t for t in args]
        sizes = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)}
        found.append((kernel.__name__, list(sizes.values())))

    with launched_by(noted):
        call(rule, x)
    return found


def main() -> None:
    for name, (text, H, HK, K, V, kept) in RULES.items():
        table.SAVED_WEIGHED = kept
        rule = Rule.parse(text)
        x = inputs(rule, H, HK, K, V)
        held = sum(t.numel() * t.element_size() for t in x if t is not None)
        out = x.v.numel() * x.v.element_size()
        show(name, launches(whole, rule, x), T * H, 3 * held + 2 * out)
    for name, (text, H, K, V) in FORWARD.items():
        rule = Rule.parse(text)
        x = inputs(rule, H, H, K, V)
        x = x._replace(q=x.q.float()) if name == "slots' outputs" else x
        held = sum(t.numel() * t.element_size() for t in x if t is not None)
        show(name, launches(forward, rule, x), T * H, held + x.v.numel() * x.v.element_size())


def show(name: str, found: list[tuple[str, list[int]]], unit: int, floor: int) -> None:
    total = sum(sum(sizes) for _, sizes in found)
    print(f"{name}: {total / unit:.0f} bytes a token and head, floor {floor / unit:.0f}")
    for kernel, sizes in found:
        print(f"  {sum(sizes) / unit:7.0f}  {kernel}  {' '.join(f'{n / unit:.0f}' for n in sizes)}")


if __name__ == "__main__":
    main()
