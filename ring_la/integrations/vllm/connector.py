# pyright: reportMissingImports=false
"""vLLM's KV connector: prompts are read by a group of ranks, vLLM decodes from what they leave.

The scheduler's side says of a long prompt that all but its last token will come from elsewhere, later; so vLLM gives it
blocks and goes on with others. The workers' side asks the reader, each worker in a thread of its own, and writes what
comes into those blocks. What the reader does not read fails that request alone, or vLLM reads it itself, as
``kv_load_failure_policy`` says ("fail", the default, or "recompute").

Keys of ``kv_connector_extra_config``:
    reader: where it listens, ``unix:PATH`` or ``HOST:PORT``.
    least: the fewest tokens that it is asked for (1024); where vLLM lacks less of a prompt, it reads that itself.
    timeout: seconds after which a prompt is given up (600).

A request with ``kv_transfer_params`` ``{"reader": false}`` is read by vLLM itself.
"""

from __future__ import annotations

from dataclasses import dataclass
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

from .fetching import Worker
from .scheduling import ConnectorSettings, Scheduler, Told
from .states import WorkerPart


@dataclass
class Loads(KVConnectorMetadata):
    """What the scheduler's side tells the workers' in a step."""

    told: Told


class RingLAConnector(KVConnectorBase_V1, SupportsHMA):
    """A reader's prompts for vLLM; made by vLLM, in the scheduler and in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(settings)
        else:
            part = WorkerPart(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
            layers = vllm_config.compilation_config.static_forward_context
            takers = vllm_config.parallel_config.world_size
            self._worker = Worker(layers, kv_cache_config.kv_cache_groups, part, takers, settings)

    # -- in the scheduler ----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._scheduler.wanted(request, num_computed_tokens)
        return (tokens, True) if tokens else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._scheduler.load(request, blocks.blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return ()  # what is not written in a block is to be zero

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        return Loads(self._scheduler.said())

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
        self._worker.start(told.told)

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
