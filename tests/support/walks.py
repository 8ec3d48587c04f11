"""The files of the package that hold a value on its way, alone or in another: a call is run and every frame looked at.

python -m tests.support.walks    # v and softcap of attention, on one device and split; a request of the engine
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import ring_la
from ring_la.models import HybridConfig, HybridLM
from ring_la.serving import Completion, Engine, Hybrid, NoText, Request

DEEP, MANY = 4, 64
SOFTCAP = 7.3125


def holds(x: Any, wanted: Callable[[Any], bool], deep: int = DEEP) -> bool:
    """Whether `x` is what is wanted, or a tuple, list, dict or object of ours that holds it."""
    if wanted(x):
        return True
    parts: Any = ()
    if isinstance(x, (tuple, list)):
        parts = x
    elif isinstance(x, dict):
        parts = x.values()
    elif is_dataclass(x) or type(x).__module__.startswith("ring_la"):
        parts = getattr(x, "__dict__", {}).values()
    return deep > 0 and len(parts) < MANY and any(holds(part, wanted, deep - 1) for part in parts)


def rooms(call: Callable[[], object], wanted: Callable[[Any], bool]) -> list[str]:
    """The files of `ring_la` in whose functions something held it, when they returned."""
    found: set[str] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        _, ours, file = frame.f_code.co_filename.rpartition("/ring_la/")
        if event == "return" and ours and file not in found:
            if any(holds(x, wanted) for x in [*frame.f_locals.values()]):
                found.add(file)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(found)


def same_memory(x: torch.Tensor) -> Callable[[Any], bool]:
    return lambda y: isinstance(y, torch.Tensor) and y.data_ptr() == x.data_ptr()


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout = ring_la.ContextParallel(scan="ring", attention="ring").layout(24)
    q, k, v = (torch.randn(1, 24, 2, 8, requires_grad=True) for _ in range(3))
    for name, where in (("one device", None), ("split", layout)):

        def attend(layout: ring_la.ShardedLayout | None = where) -> None:
            ring_la.attention(q, k, v, softcap=SOFTCAP, layout=layout).o.sum().backward()

        attend()  # kernels are chosen and plans made in a first call
        for what, wanted in (("softcap", lambda y: type(y) is float and y == SOFTCAP), ("v", same_memory(v))):
            found = rooms(attend, wanted)
            print(f"{what}, {name}: {len(found)}: {', '.join(found)}")
    model = HybridLM(HybridConfig(vocab_size=19, dim=16, layers=["gdn", "attention"], num_heads=2))
    engine, job = Engine(Hybrid(model), NoText(), piece=16), Completion(Request([3] * 40, 5), lambda event: None)

    def answer() -> None:
        engine.submit(job)
        engine.stop()
        engine.run()

    found = rooms(answer, lambda x: x is job)
    print(f"a request: {len(found)}: {', '.join(found)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
