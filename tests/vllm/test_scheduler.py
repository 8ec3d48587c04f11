"""What the connector's scheduler side remembers of requests. Needs vLLM: bash launch/vllm.sh."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_requests_that_are_over_leave_nothing():
    from ring_la.integrations.vllm.connector import ConnectorSettings, Scheduler

    scheduler, blocks = Scheduler(ConnectorSettings("unix:/none", 4, 1.0)), SimpleNamespace(blocks=[[]])

    def asked(name: str) -> SimpleNamespace:
        request = SimpleNamespace(
            request_id=name, num_tokens=9, all_token_ids=list(range(9)),
            prompt_embeds=None, mm_features=[], lora_request=None, kv_transfer_params=None,
        )  # fmt: skip
        assert scheduler.wanted(request) == 8
        scheduler.load(request, blocks, 8)
        return request

    failed, _, read = map(asked, ("failed", "gone", "read"))
    assert [load.name for load in scheduler.said().new] == ["failed", "gone", "read"]
    scheduler.forget("gone")
    assert scheduler.said().given_up == ["gone"]
    scheduler.ended({"failed", "gone", "read"}, {"failed", "gone"})
    assert scheduler.wanted(failed) == 0  # vLLM reads it itself
    for request in (failed, read):
        scheduler.forget(request.request_id)
    assert scheduler.said().given_up == []
    assert (scheduler._ours, scheduler._under_way) == (set(), {})
