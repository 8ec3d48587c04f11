"""Architectures of Transformers over GPUs against the unmodified model: `pytest -m gpu tests/gpu/test_transformers.py`.

Every recurrent and indexed architecture of the CPU suite, and softmax models with windows, sinks and soft caps, widened
to head dimensions of 64, 1024 tokens, dense and packed, on groups of 2 and of 4 ranks. The truth is the unmodified
model in fp32 on one GPU, by the library's own PyTorch functions. In fp32 errors are relative to it; in bf16 they stand
beside those of the unmodified model in bf16.

Groups of 2 run side by side if pytest-xdist does: with `-n 2 -k P2` on 4 GPUs, each worker has two of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import transformers

import ring_la
from tests.support import pool
from tests.support.transformers_models import INDEXED, RECURRENT, SMALL, SOFTMAX, VOCABULARY, Case

WIDE = dict(
    hidden_size=256,
    intermediate_size=256,
    head_dim=64,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_head_dim=64,
    kv_lora_rank=64,
    q_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    mamba_n_heads=8,
    mamba_d_head=64,
    mamba_d_state=64,
    mamba_d_ssm=512,
    ssm_state_size=64,
    mamba_head_dim=64,
    state_size=64,
    mamba_chunk_size=64,
    chunk_size=64,
    block_size=64,
    ple_embed_dim=64,
    indexer_head_dim=64,
    index_head_dim=64,
    indexer_budget=128,
    index_topk=128,
    sliding_window=100,
    max_position_embeddings=2048,
)
EXTRA = {
    "mamba2": {"head_dim": 64},
    "deepseek_v3": {"head_dim": 32},
    "zamba": {"attention_hidden_size": 512, "attention_head_dim": 128},
    "mamba": {"state_size": 16},
    "falcon_mamba": {"state_size": 16},
}
PLAIN = ("gemma2", "gpt_oss", "llama4", "deepseek_v3", "falcon", "gptj")
ARCHITECTURES: dict[str, Case] = RECURRENT | INDEXED | {n: SOFTMAX[n] for n in PLAIN}
DOCUMENTS = (0, 1, 100, 700, 1024)
"""Offsets of packed documents, in 1024ths of the sequence."""


def widened(options: dict) -> dict:
    out = {n: WIDE[n] if x and n in WIDE else x for n, x in options.items()}
    return {n: widened(x) if n == "text_config" else x for n, x in out.items()}


@dataclass(frozen=True)
class Check:
    """One architecture, dense (two rows) or packed (one row of documents)."""

    name: str
    packed: bool
    length: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name} {'packed' if self.packed else 'dense'}"

    def make(self, dtype: torch.dtype) -> torch.nn.Module:
        case = ARCHITECTURES[self.name]
        small = {n: x for n, x in widened(SMALL).items() if n not in case.skip}
        return (
            replace(case, options=small | widened(case.options) | EXTRA.get(self.name, {}))
            .make()
            .to(self.device, dtype)
        )

    def ids(self) -> torch.Tensor:
        random = torch.Generator().manual_seed(7)
        return torch.randint(3, VOCABULARY, (1 if self.packed else 2, self.length), generator=random).to(self.device)

    def offsets(self) -> list[int]:
        if not self.packed:
            return [0, self.length]
        first, *rest = DOCUMENTS
        return [first, *(max(x * self.length // 1024, i) for i, x in enumerate(rest, 1))]

    def whole(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Loss, logits and gradients of the unmodified model, documents one at a time."""
        model, ids, spans = self.make(dtype), self.ids(), list(zip(self.offsets(), self.offsets()[1:]))
        total, logits = torch.zeros((), device=self.device), []
        for a, b in spans:
            out = model(input_ids=ids[:, a:b], labels=ids[:, a:b] if b - a > 1 else None, use_cache=False)
            logits.append(out.logits.detach().float())
            if b - a > 1:
                loss = out.loss * ((b - a - 1) / (self.length - len(spans)))
                loss.backward()
                total = total + loss.detach().float()
        return {"loss": total, "logits": torch.cat(logits, 1)} | gradients(model)

    def split(self, dtype: torch.dtype, cp: ring_la.ContextParallel, took: Took) -> dict[str, torch.Tensor]:
        """The same on a split sequence, gradients summed over the group."""
        from ring_la.integrations.transformers import parallelize

        model, ids = parallelize(self.make(dtype), cp), self.ids()
        took.part(f"parallelize {dtype}".replace("torch.", ""))
        documents = {"cu_seqlens": torch.tensor(self.offsets())} if self.packed else {}
        out = model(input_ids=ids, labels=ids, **documents)
        out.loss.backward()
        logits = out.layout.gather(out.logits.detach().float().contiguous())
        summed = {n: cp.comm.all_reduce(g.contiguous()).wait() for n, g in gradients(model).items()}
        took.part(f"split {dtype}".replace("torch.", ""))
        return {"loss": out.loss.detach().float(), "logits": logits} | summed

    def run(self, cp: ring_la.ContextParallel) -> dict[str, dict]:
        took = Took()
        truth = self.whole(torch.float32)
        took.part("whole float32")
        out = {dtype: errors(self.split(getattr(torch, dtype), cp, took), truth) for dtype in ("float32", "bfloat16")}
        try:
            out["unmodified bfloat16"] = errors(self.whole(torch.bfloat16), truth)
        except RuntimeError as error:  # xLSTM's own mixes dtypes
            out["unmodified"] = str(error)[:80]
        took.part("whole bfloat16")
        return out | {"took": took.parts}


class Took:
    """Where a check's seconds went: most of a first one's are kernels being compiled."""

    def __init__(self) -> None:
        self.at, self.parts = time.monotonic(), {}

    def part(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.parts[name], self.at = round(now - self.at, 2), now


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: (torch.zeros_like(p) if p.grad is None else p.grad).float() for n, p in model.named_parameters()}


def errors(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative error of the loss, of the logits, and of all gradients together and the worst (by its own size)."""
    norms = {n: (float((got[n] - truth[n]).norm()), float(truth[n].norm())) for n in truth}
    grads = {n: x for n, x in norms.items() if n not in ("loss", "logits")}
    size = sum(b * b for _, b in grads.values()) ** 0.5
    worst = max(grads, key=lambda n: grads[n][0] / max(grads[n][1], 1e-3 * size))
    return {
        "loss": norms["loss"][0] / norms["loss"][1],
        "logits": norms["logits"][0] / norms["logits"][1],
        "gradients": sum(a * a for a, _ in grads.values()) ** 0.5 / size,
        "worst": grads[worst][0] / max(grads[worst][1], 1e-3 * size),
        "worst of": worst,
    }


def wrong(result: dict) -> bool:
    """Whether gradients are off: by 1e-3 in fp32, in bf16 by three times the unmodified model's own."""
    return not result["float32"]["gradients"] <= 1e-3 or _coarse(result)


def _coarse(result: dict) -> bool:
    own = result.get("unmodified bfloat16")
    return result["bfloat16"]["gradients"] > (0.2 if own is None else 3 * own["gradients"] + 1e-2)


@dataclass(frozen=True)
class Half:
    """Half of a group, which compiles the kernels of one dtype while the other half compiles the other's."""

    cp: ring_la.ContextParallel
    dtype: torch.dtype

    @classmethod
    @cache
    def of(cls, rank: int, P: int, timeout: float) -> Half:
        """That of this rank, of P that are all of the job; collective."""
        mine = None
        for i, dtype in enumerate((torch.float32, torch.bfloat16)):
            ranks = list(range(i * P // 2, (i + 1) * P // 2))
            handle = dist.new_group(ranks)
            if rank in ranks:
                mine = cls(ring_la.ContextParallel(handle, timeout=timeout), dtype)
        assert mine is not None
        return mine


LENGTH, LIMIT = 1024, 150.0
"""Tokens; seconds a check may take."""


@cache
def context(P: int) -> ring_la.ContextParallel:
    return ring_la.ContextParallel(pool.group(P), timeout=LIMIT)


def check_architecture(rank: int, P: int, name: str, packed: bool, length: int = LENGTH) -> dict:
    cp = context(P)
    check = Check(name, packed, length, cp.device)
    if P > 2 and P == dist.get_world_size() and not packed:
        half = Half.of(rank, P, LIMIT)
        check.split(half.dtype, half.cp, Took())
    return check.run(cp)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("P", [pytest.param(P, id=f"P{P}", marks=pytest.mark.gpu(needs=P)) for P in (2, 4)])
def test_against_the_unmodified_model(P, name, packed, gpu_ranks, record_property):
    if not hasattr(transformers, ARCHITECTURES[name].model):
        pytest.skip(f"not in transformers {transformers.__version__}")
    result = gpu_ranks.run(P, check_architecture, P, name, packed, timeout=LIMIT)[0]
    record_property("result", result)
    assert not wrong(result), result
