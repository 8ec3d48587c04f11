"""A worker's side of vLLM's connector: prompts are fetched from the reader into the worker's memory, each in a thread.

vLLM's objects are used by their attributes; vLLM itself is not imported here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .asking import Lease
from .hosts import Remote
from .pages import HandedOver, SequenceBlocks, check_layers
from .scheduling import ConnectorSettings, Load, Told
from .states import WorkerPart

LOG = logging.getLogger(__name__)


class Worker:
    """Fetches prompts into the memory of one worker, each in a thread.

    Args:
        layers: vLLM's modules by name. groups: its groups of layers (`kv_cache_groups`). part: this worker's of heads
            and channels. takers: how many workers fetch a prompt.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        groups: Sequence[Any],
        part: WorkerPart,
        takers: int,
        settings: ConnectorSettings,
    ) -> None:
        self._layers, self._groups, self._part, self._takers, self._settings = layers, groups, part, takers, settings
        check_layers(self._own())
        self._leases: dict[str, Lease] = {}
        self._remote = Remote(settings.timeout)
        self._results: tuple[set[str], set[str]] = (set(), set())
        self._lock = threading.Lock()

    def start(self, told: Told) -> None:
        """Begin to fetch, and give up."""
        for load in told.new:
            self._leases[load.name] = Lease(self._settings.reader, self._settings.timeout)
            threading.Thread(target=self._fetch, args=(load, self._leases[load.name], _ready()), daemon=True).start()
        for name in told.given_up:
            lease = self._leases.get(name)
            if lease is not None:
                lease.close()

    def results(self) -> tuple[set[str], set[str]]:
        """Requests that ended since the last call, and those of them that failed."""
        with self._lock:
            results, self._results = self._results, (set(), set())
        for name in results[0]:
            del self._leases[name]
        return results

    def close(self) -> None:
        """Give all up."""
        for lease in list(self._leases.values()):
            lease.close()

    def _fetch(self, load: Load, lease: Lease, ready: torch.cuda.Event | None) -> None:
        failed = True
        try:
            parcels = lease.parcels(load.asked, torch.tensor(load.ids, device="cpu"), self._takers)
            with torch.inference_mode(), _beside(ready):
                self._write(load, parcels)
            failed = False
        except Exception as error:  # of whatever kind: it is this request's, and vLLM is told
            LOG.warning("request %s: %s", load.name, error)
        finally:
            lease.close()
            with self._lock:
                self._results[0].add(load.name)
                if failed:
                    self._results[1].add(load.name)

    def _own(self) -> dict[str, Any]:
        """Layers with pages of their own: those that share another's keys have none."""
        named = {name: self._layers[name] for group in self._groups for name in group.layer_names}
        return {n: layer for n, layer in named.items() if not getattr(layer, "kv_sharing_target_layer_name", None)}

    def _write(self, load: Load, parcels: list[dict[str, Any]]) -> None:
        own = self._own()
        first = next(iter(own.values())).kv_cache
        device = first.device if isinstance(first, torch.Tensor) else first[0].device
        over, span = HandedOver(parcels, device, self._remote.read), (load.start, len(load.ids))
        numbers = over.numbered(own)
        for group, ids in zip(self._groups, load.blocks):
            blocks = SequenceBlocks(ids, group.kv_cache_spec.block_size)
            for name in own.keys() & set(group.layer_names):
                over.write(numbers[name], own[name], blocks, span, self._part)


def _ready() -> torch.cuda.Event | None:
    """After what vLLM has queued so far, blocks that it sets to zero among it; None on a CPU, where that is done."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None


class _beside:
    """Within it work is queued on a stream of its own, after `ready`; at its end that work is done."""

    def __init__(self, ready: torch.cuda.Event | None) -> None:
        self._ready = ready

    def __enter__(self) -> None:
        if self._ready is not None:
            self._stream = torch.cuda.Stream()
            self._stream.wait_event(self._ready)
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._ready is not None:
            self._context.__exit__(*error)
            self._stream.synchronize()
