"""xDiT's own `usp.USP` and Sana layer with ours inside (`ring_la.integrations.xdit.install`), from a checkout of xDiT.

    python -m tests.integrations.real_xdit CHECKOUT

Prints each error beside attention of one process, on 2 and 4 CPU processes over gloo; exits with the number of wrong
ones. xDiT imports on GPUs alone: PyTorch is told that there is one, and what is not installed stands empty. Its groups
and its runtime's state are set, not made. No test collects it: the import takes each rank longer than all the rest.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ring_la.integrations import xdit
from tests.support.attention_cases import error
from tests.support.pool import Ranks

GPU = types.SimpleNamespace(gcnArchName="", major=9, minor=0)
SAYS = dict(is_available=True, current_device=0, get_device_name="a GPU", get_device_capability=(9, 0), device_count=1)


class Empty(types.ModuleType):
    """In place of a package that is not there."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def imported(checkout: Path) -> types.ModuleType:
    """The module `usp` of xDiT."""
    sys.path.insert(0, str(checkout))
    import diffusers  # noqa: F401  before PyTorch says that there is a GPU

    answers: dict[str, Any] = {name: lambda *_, said=said: said for name, said in SAYS.items()}
    answers["get_device_properties"] = lambda *_: GPU
    with mock.patch.multiple(torch.cuda, **answers), mock.patch.object(torch.version, "cuda", "13.0"):
        while True:
            try:
                importlib.import_module("xfuser.core.fast_attention")
                return importlib.import_module("xfuser.model_executor.layers.usp")
            except ModuleNotFoundError as e:
                for name in [n for n in sys.modules if n.split(".")[0] == "xfuser"]:
                    del sys.modules[name]
                sys.modules[str(e.name)] = Empty(str(e.name))


def settle(usp: types.ModuleType, ulysses: int, ring: int) -> None:
    """The groups of `ulysses` x `ring` ranks, and a runtime that says so."""
    ranks = torch.arange(ulysses * ring).view(ring, ulysses)
    made = {True: [dist.new_group(row.tolist()) for row in ranks], False: [dist.new_group(c.tolist()) for c in ranks.T]}
    rank = dist.get_rank()
    usp.PROCESS_GROUP.ULYSSES_PG, usp.PROCESS_GROUP.RING_PG = made[True][rank // ulysses], made[False][rank % ulysses]
    for name, size in (("ulysses", ulysses), ("ring", ring), ("sequence", ulysses * ring)):
        setattr(usp, f"get_{name}_parallel_world_size", lambda size=size: size)
    usp.get_ulysses_parallel_rank = lambda: rank % ulysses
    plain = types.SimpleNamespace(use_spargeattn_head_balance=False)
    backend = usp.AttentionBackendType.SDPA
    usp.get_runtime_state = lambda: types.SimpleNamespace(
        attention_backend=backend, runtime_config=plain, fp8_comms=None
    )


def check(rank: int, P: int, checkout: Path) -> dict[str, float]:
    """Errors of every split over P ranks, which are all there are."""
    usp, found = imported(checkout), {}
    back = xdit.install()
    try:
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, 4, 6 * P, 8)
        joint = torch.randn(3, 1, 4, 3, 8)
        mine = slice(6 * rank, 6 * rank + 6)
        own = [x[:, :, mine] for x in (q, k, v)]
        for ulysses in (n for n in (1, 2, 4) if P % n == 0):
            settle(usp, ulysses, P // ulysses)
            name = f"{P} ranks, Ulysses {ulysses} x ring {P // ulysses}"
            want = F.scaled_dot_product_attention(q, k, v)[:, :, mine]
            found[name] = error(usp.USP(*own), want)
            for where in ("front", "rear"):
                more = dict(zip(("joint_query", "joint_key", "joint_value"), joint)) | dict(joint_strategy=where)
                if ulysses > 1:  # xDiT exchanges joint queries with the others, a part of each rank's
                    continue
                keys = [torch.cat([j, x] if where == "front" else [x, j], 2) for j, x in zip(joint[1:], (k, v))]
                wide = [joint[0], own[0]] if where == "front" else [own[0], joint[0]]
                out = usp.USP(*own, **more)
                found[f"{name}, text {where}"] = error(out, F.scaled_dot_product_attention(torch.cat(wide, 2), *keys))
        layers = importlib.import_module("xfuser.core.long_ctx_attention.hybrid.attn_layer")
        layer = layers.xFuserSanaLinearLongContextAttention.__new__(layers.xFuserSanaLinearLongContextAttention)
        torch.nn.Module.__init__(layer)
        parallel = importlib.import_module("xfuser.core.distributed")
        group = types.SimpleNamespace(device_group=dist.group.WORLD)
        with mock.patch.object(parallel, "get_sp_group", return_value=group):
            out = layer.forward(None, *(x.transpose(1, 2) for x in own))
        scores = F.relu(q).double() @ F.relu(k).double().mT
        want = (scores / scores.sum(-1, keepdim=True)) @ v.double()
        found[f"{P} ranks, Sana's layer"] = error(out, want[:, :, mine].transpose(1, 2).flatten(2))
    finally:
        back()
    return found


def main(checkout: Path) -> int:
    wrong = 0
    for P in (2, 4):
        ranks = Ranks(P)
        for name, e in ranks.run(P, check, P, checkout, timeout=500)[0].items():
            print(f"{name}: {e:.0e}", flush=True)
            wrong += not e < 1e-5
        ranks.stop()
    return wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
