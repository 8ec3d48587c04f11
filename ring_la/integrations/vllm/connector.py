# pyright: reportMissingImports=false
"""vLLM's KV connector: prompts are read by a group of ranks, vLLM decodes from what they leave.

The scheduler's side says of a long prompt that all but its last token will come from elsewhere, later; so vLLM gives it
blocks and goes on with others. The workers' side asks the reader, each worker in a thread of its own, and writes what
comes into those blocks. What the reader does not read fails that request alone, or vLLM reads it itself, as
``kv_load_failure_policy`` says ("fail", the default, or "recompute").

Keys of ``kv_connector_extra_config``:
    reader: where it listens, ``unix:PATH`` or ``HOST:PORT``.
    least: the fewest tokens of a prompt that it is asked for (1024); shorter ones vLLM reads itself.
    timeout: seconds after which a prompt is given up (600).

A request with ``kv_transfer_params`` ``{"reader": false}`` is read by vLLM itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ...errors import ArgumentError, UnsupportedError
from .asking import Lease, connection
from .hosts import Remote
from .pages import HandedOver, SequenceBlocks, WorkerPart, check_layers

LOG = logging.getLogger(__name__)


@dataclass
class Load:
    """A prompt that workers are to fetch.

    Attributes:
        name: vLLM's of the request. ids: the tokens that the reader reads.
        start: of those, how many are in vLLM's memory already.
        blocks: the sequence's blocks in each group of layers; −1: none.
    """

    name: str
    ids: list[int]
    start: int
    blocks: list[list[int]]


@dataclass
class Loads(KVConnectorMetadata):
    """What the scheduler's side tells the workers' in a step: prompts to fetch, and names of those to give up."""

    new: list[Load] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ConnectorSettings:
    """What is set in ``kv_connector_extra_config``."""

    reader: str
    least: int
    timeout: float

    @classmethod
    def of(cls, config: VllmConfig) -> ConnectorSettings:
        """Those of a vLLM.

        Raises:
            ArgumentError, UnsupportedError: by name, of what is wrong or cannot be had.
        """
        extra = config.kv_transfer_config.get_from_extra_config
        unknown = config.kv_transfer_config.kv_connector_extra_config.keys() - {"reader", "least", "timeout"}
        if unknown:
            raise ArgumentError("kv_connector_extra_config", "reader, least, timeout", sorted(unknown))
        reader, least, timeout = extra("reader", ""), extra("least", 1024), extra("timeout", 600)
        for name, value in (("least", least), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ArgumentError(name, "a number above 0", repr(value))
        connection(reader, 1.0)
        parallel = config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise UnsupportedError(name, "1 with RingLAConnector", getattr(parallel, name))
        if config.speculative_config is not None and config.model_config.is_hybrid:
            raise UnsupportedError("speculative_config", "none for a model with recurrent layers", "one")
        return cls(reader, int(least), float(timeout))


class RingLAConnector(KVConnectorBase_V1, SupportsHMA):
    """A reader's prompts for vLLM; made by vLLM, in the scheduler and in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(settings)
        else:
            self._worker = Worker(vllm_config, kv_cache_config, settings)

    # -- in the scheduler ----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._scheduler.wanted(request) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._scheduler.load(request, blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return ()  # what is not written in a block is to be zero

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        return self._scheduler.said()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.ended(connector_output.finished_recving or (), connector_output.failed_recving or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self._scheduler.forget(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self._scheduler.forget(request.request_id)
        return False, None

    # -- in a worker ---------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        told = self._get_connector_metadata()
        assert isinstance(told, Loads)
        self._worker.start(told)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request waits until all of it is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any) -> None:
        """Nothing: what vLLM reads stays in vLLM."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, failed = self._worker.results()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()


class Scheduler:
    """Which prompts come from the reader."""

    def __init__(self, settings: ConnectorSettings) -> None:
        self._settings = settings
        self._said = Loads()
        self._under_way: dict[str, bool] = {}  # whether anybody waits for it still
        self._ours: set[str] = set()  # that vLLM is to read itself, after the reader failed

    def wanted(self, request: Request) -> int:
        """The tokens of a request that the reader is asked for: all but the last, or none."""
        plain = request.prompt_embeds is None and not request.mm_features and request.lora_request is None
        plain = plain and (request.kv_transfer_params or {}).get("reader") is not False
        if not plain or request.num_tokens - 1 < self._settings.least or request.request_id in self._ours:
            return 0
        return request.num_tokens - 1

    def load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """The workers are to fetch the last `tokens` of those that are wanted, into these blocks."""
        ids = list(request.all_token_ids[: request.num_tokens - 1])
        numbers = [[-1 if block.is_null else block.block_id for block in group] for group in blocks.blocks]
        self._under_way[request.request_id] = True
        self._said.new.append(Load(request.request_id, ids, len(ids) - tokens, numbers))

    def said(self) -> Loads:
        """What the workers are told in this step."""
        said, self._said = self._said, Loads()
        return said

    def ended(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """What workers have fetched, with or without success."""
        waits = {name for name in done if self._under_way.pop(name, False)}
        self._ours |= waits.intersection(failed)

    def forget(self, name: str) -> None:
        """A request is over, or nobody waits for it any more."""
        self._ours.discard(name)
        if name in self._under_way:
            self._under_way[name] = False
            self._said.given_up.append(name)


class Worker:
    """Fetches prompts into the memory of one worker, each in a thread."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: ConnectorSettings) -> None:
        self._settings, self._groups = settings, cache.kv_cache_groups
        self._layers = config.compilation_config.static_forward_context
        check_layers(self._own())
        self._part = WorkerPart(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        self._takers = config.parallel_config.world_size
        self._leases: dict[str, Lease] = {}
        self._remote = Remote(settings.timeout)
        self._results: tuple[set[str], set[str]] = (set(), set())
        self._lock = threading.Lock()

    def start(self, told: Loads) -> None:
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
            parcels = lease.parcels(load.name, torch.tensor(load.ids), self._takers)
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
