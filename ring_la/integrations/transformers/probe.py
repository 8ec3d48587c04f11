"""Does anything but the covered layers cross the sequence? Measured on the model itself.

Two documents are run side by side on one device, positions counting on over their border, and only ring_la's operators
are told of the border. Then the first document is changed, then the second. Where a token's result changes with the
other document, some module carries a state of its own along the sequence, and would do so wrongly on a split one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError

TOKENS, BORDER = 280, 140
"""Longer than the blocks of 128 tokens that compressing layers work on, none of which begins at the border."""
SKETCH = 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def find_leak(model: nn.Module, run: Callable[[Tensor, int], object], vocabulary: int, device: torch.device) -> str:
    """The innermost module whose result at one document depends on the other: ``name (class)``; "" if there is none.

    Args:
        run: calls the model with ids ``[1, TOKENS]``, of which a document starts at 0 and one at BORDER.
        vocabulary: the number of token ids.
    """
    suspects = _compare(model, run, vocabulary, device, seed=0)
    if not suspects:
        return ""
    again = _compare(model, run, vocabulary, device, seed=1)  # near-ties of a router do not come twice
    for name, places in suspects.items():
        if places & again.get(name, set()):
            kind = type(model.get_submodule(name)).__name__
            return f"{name} ({kind})" if name else kind
    return ""


def _compare(
    model: nn.Module, run: Callable[[Tensor, int], object], vocabulary: int, device: torch.device, seed: int
) -> dict[str, set[int]]:
    """For each module, in the order they finish, the tokens whose result changed with the other document."""
    random = torch.Generator().manual_seed(seed)
    one, two = torch.randint(vocabulary, (2, TOKENS), generator=random)
    first, second = torch.cat([two[:BORDER], one[BORDER:]]), torch.cat([one[:BORDER], two[BORDER:]])
    sketches = [_sketches(model, lambda x=x: run(x[None].to(device), BORDER)) for x in (one, first, second)]
    out: dict[str, set[int]] = {}
    for name, base in sketches[0].items():
        changed: set[int] = set()
        for other, kept in ((sketches[1], range(BORDER, TOKENS)), (sketches[2], range(BORDER))):
            if name not in other:
                continue
            a, b = base[kept.start : kept.stop], other[name][kept.start : kept.stop]
            far = (a - b).norm(dim=-1) > TOLERANCE.get(_dtype(model), 3e-2) * (a.norm(dim=-1) + 1e-12)
            changed |= {int(t) + kept.start for t in far.nonzero().flatten()}
        if changed:
            out[name] = changed
    return out


def _sketches(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """For each module that returns one row a token, its result projected on a few random directions ``[TOKENS, 4]``."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable:
        def keep(module: nn.Module | None, args: tuple, output: object) -> None:
            x = output[0] if isinstance(output, (tuple, list)) and output else output
            x = getattr(x, "last_hidden_state", None) if not isinstance(x, Tensor) else x
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return
            x = x[0] if x.dim() > 2 and x.shape[0] == 1 else x
            if x.dim() >= 2 and x.shape[0] == TOKENS:
                flat = x.detach().flatten(1).float()
                random = torch.Generator().manual_seed(flat.shape[1])
                directions = torch.randn(flat.shape[1], SKETCH, generator=random).to(flat.device)
                found[name] = (flat @ directions).cpu()

        return keep

    experts = tuple(f"{n}." for n, m in model.named_modules() if hasattr(m, "is_transposed"))  # rows sorted by expert
    modules = [(n, m) for n, m in model.named_modules() if n and not n.startswith(experts)]
    hooks = [m.register_forward_hook(hook(n)) for n, m in modules]
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            hook("")(None, (), run())
    finally:
        for h in hooks:
            h.remove()
        for m, training in modes:
            m.training = training
    return found


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def refuse(leak: str) -> None:
    """Raise the error for a module that crosses the sequence."""
    raise UnsupportedError(
        "model",
        "layers that work token by token, or are listed in ring_la.integrations.transformers.mixers",
        f"{leak}, whose result at one token depends on others",
        "An entry there makes it run on a split sequence",
    )
