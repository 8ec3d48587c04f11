"""The calls of `test_attention` split over all GPUs: strategies × layouts × transports × kernels.

    pytest -m gpu tests/gpu/test_attention_split.py --gpu-seconds 150

The whole group, a mesh and two groups of half the ranks. Kernels are compiled first, by processes side by side; inputs
and fp64 references are made once a (feature, width, dtype). The matrix is covered in order of worth: what
--gpu-seconds leaves out is skipped, the least telling last.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ring_la
from ring_la import ContextParallel
from ring_la.softmax import attention
from ring_la.softmax.backends import Ask, choose
from tests.gpu.test_attention import FEATURES, FLOOR, WIDTHS, T, draw, off, one_device, run, truth
from tests.support import pool
from tests.support.attention_cases import error
from tests.support.gpu import ranks, world

pytestmark = pytest.mark.gpu(needs=2)

KINDS, STRATEGIES = ("contiguous", "zigzag", "striped"), ("ring", "all_gather", "ulysses")
HALVES = (torch.bfloat16, torch.float16)
BACKENDS, TRANSPORTS = ("cudnn", "flash", "flash_attn_4", "triton", "torch"), ("torch", "auto")
JOBS, COMPILING = 10, 75.0
"""Processes a GPU that compile, and the seconds they get: what is left is compiled where it is met."""


def split(
    rank: int, group: str, backend: str, feature: str, D: int, dtype: torch.dtype, kind: str, strategy: str | None
) -> tuple[dict, dict] | str:
    """Errors of one call under a layout, of this rank's part of everything, and those beyond their limits; or why the
    kernel refuses."""
    cp = contexts()[group]
    tensors, how, cu, do, dlse = draw(feature, D, dtype)
    want, layout = truth(feature, D, dtype), cp.layout(T, kind, cu_seqlens=cu)
    local = {n: (layout.shard(t) if n in "qkv" else t).to(dtype) for n, t in tensors.items()}
    more = dict(layout=layout, strategy=strategy, backend=backend)
    try:
        got = run(attention, local, layout.shard(do), layout.shard(dlse, dim=2), **how, **more)
    except ring_la.UnsupportedError as e:
        return str(e)
    shared = {
        n: cp.comm.all_reduce(g.float()).wait() for n, g in got.items() if n in ("dsinks", "djoint_k", "djoint_v")
    }
    parts = {n: layout.shard(t, dim=2 if n == "lse" else 1) for n, t in want.items() if n not in shared}
    found = {n: error(shared.get(n, g), parts.get(n, want[n])) for n, g in got.items()}
    return found, off(found, dtype, D)


def matrix(groups: list[str], backends: tuple[str, ...], widths: tuple[int, ...]) -> Iterator[tuple]:
    """(group, backend, feature, D, dtype, kind, strategy), the most telling first."""
    whole = [g for g in groups if g in ("torch", "auto")]
    kernels = [k for k in itertools.product(widths, HALVES, backends) if k[2] != "torch" or k[:2] == (64, HALVES[0])]
    for D, dtype, backend in kernels:  # every strategy × layout × kernel × width × dtype, by one feature
        for kind in KINDS:
            yield from ((g, backend, "gqa", D, dtype, kind, "ring") for g in whole)
            yield from ((whole[0], backend, "gqa", D, dtype, kind, s) for s in STRATEGIES[1:])
            yield from ((g, backend, "gqa", D, dtype, kind, "ulysses") for g in whole[1:])
    turns = itertools.cycle(itertools.product(KINDS, STRATEGIES))
    for D, dtype, backend in kernels:
        yield from ((g, backend, "gqa", D, dtype, "zigzag", None) for g in groups if g == "mesh")
        yield from ((g, backend, "gqa", D, dtype, *next(turns)) for g in groups if g.startswith("half"))
    for n, D in enumerate(
        w for w in (128, 64) if w in widths
    ):  # every feature × strategy × transport × kernel; each width with other layouts
        for turn, (m, feature), backend in itertools.product(range(4), enumerate(FEATURES), backends):
            group, strategy = (
                [(g, "ring") for g in (whole * 2)[:2]][turn] if turn < 2 else (whole[turn - 4], STRATEGIES[turn - 1])
            )
            if backend != "torch" or D == 64:
                yield group, backend, feature, D, HALVES[0], KINDS[(m + n + turn) % 3], strategy
    for feature, backend in itertools.product(FEATURES, backends):
        yield from ((g, backend, feature, 64, HALVES[0], "zigzag", None) for g in groups if g == "mesh")


def compile_part(part: int, parts: int, device: int) -> None:
    """One device's calls: the kernels that splits will want."""
    torch.cuda.set_device(device)
    wanted = [(f, D, d) for D in WIDTHS for d in HALVES for f in FEATURES if f == "gqa" or (d == HALVES[0] and D < 256)]
    for feature, D, dtype in wanted[part::parts]:
        one_device("triton", feature, D, dtype)


def groups(P: int) -> list[str]:
    """Names of `contexts` on P ranks."""
    more = ["mesh", *(f"half {name}" for name in TRANSPORTS)] if P % 2 == 0 and P > 2 else []
    return [*TRANSPORTS, *more]


@cache
def contexts() -> dict[str, ContextParallel]:
    """The whole group by each transport, a 2 × n mesh, and the half of the ranks that this one is in."""
    P, rank = dist.get_world_size(), dist.get_rank()
    out = {name: ContextParallel(pool.group(P), scan="ring", transport=name) for name in TRANSPORTS}
    if len(groups(P)) > len(out):
        mesh = init_device_mesh("cuda", (P // 2, 2), mesh_dim_names=("ring", "ulysses"))
        out["mesh"] = ContextParallel(mesh, scan="ring", attention="usp", transport=TRANSPORTS[-1])
        halves = [dist.new_group(list(range(first, P, 2))) for first in (0, 1)]
        for name in TRANSPORTS:
            out[f"half {name}"] = ContextParallel(halves[rank % 2], scan="ring", transport=name)
    return out


def stalled_peer(rank: int) -> str:
    """What this rank finds where the last rank stays away for longer than the timeout: the error that names it."""
    P = dist.get_world_size()
    cp = ContextParallel(pool.group(P), scan="ring", timeout=2.0)
    layout = cp.layout(T, "zigzag")
    q, k, v = (torch.randn(1, layout.local_length, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if not attention(q, k, v, layout=layout, strategy="ring").o.isfinite().all():
        return "not finite before"
    found = f"no message from rank {P - 1}"
    if rank == P - 1:
        time.sleep(4)
    else:
        if not attention(q, k, v, layout=layout, strategy="ring").o.isnan().any():
            found = "what did not come is no NaN"
        try:
            attention(q, k, v, layout=layout, strategy="ring")
            found = "no error"
        except ring_la.errors.PeerError as error:
            found = found if found in str(error) else f"{found}; {error}"
    torch.cuda.synchronize()
    dist.barrier()
    return found


def deterministic(rank: int, features: tuple[str, ...] = ("causal", "packed", "all")) -> list[str]:
    """What differs by a bit, with ``deterministic=True``: results on all ranks from those on half of them and under
    another layout, gradients from those of a second call. Collective."""
    P, bad = dist.get_world_size(), []
    halves = [dist.new_group(list(range(first, P, 2))) for first in (0, 1)]
    cps = [ContextParallel(group, deterministic=True) for group in (pool.group(P), halves[rank % 2])]
    for feature in features:
        tensors, how, cu, do, dlse = draw(feature, 64, HALVES[0])
        first: list[torch.Tensor] = []
        for cp, kind in ((cps[0], "zigzag"), (cps[0], "contiguous"), (cps[1], "zigzag")):
            layout = cp.layout(T, kind, cu_seqlens=cu)
            local = {n: (layout.shard(t) if n in "qkv" else t).to(HALVES[0]) for n, t in tensors.items()}
            shared = {n: local.pop(n) for n in tuple(local) if n not in "qkv"}  # no gradients of these, so asked for
            asked: dict = {**shared, **how, "layout": layout}
            calls = [run(attention, local, layout.shard(do), layout.shard(dlse, dim=2), **asked) for _ in "12"]
            bad += [
                f"{feature} {kind} P{cp.size} {n} twice" for n, x in calls[0].items() if not torch.equal(x, calls[1][n])
            ]
            whole = [layout.gather(calls[0]["o"]), layout.gather(calls[0]["lse"], dim=2)]
            first = first or whole
            if not all(map(torch.equal, first, whole)):
                bad.append(f"{feature} {kind} P{cp.size}")
    return bad


def on_the_wire(rank: int, backend: str, group: str, dtype: torch.dtype) -> float:
    """The error of o where keys and values travel in eight bits, on this rank; nothing with gradients."""
    tensors, _, _, _, _ = draw("causal", 128, HALVES[0])
    want = truth("causal", 128, HALVES[0])["o"]
    layout = contexts()[group].layout(T, "zigzag")
    q, k, v = (layout.shard(tensors[n]).to(HALVES[0]) for n in "qkv")
    with torch.no_grad():
        o = attention(q, k, v, layout=layout, backend=backend, strategy="ring", kv_comm_dtype=dtype).o
    return error(o, layout.shard(want))


def title(group: str, backend: str, feature: str, D: int, dtype: torch.dtype, kind: str, strategy: str | None) -> str:
    return f"{group}-{kind}-{strategy or 'usp'}-{backend}-{feature}-D{D}-{str(dtype)[6:]}"


def parameters() -> list:
    """The matrix on the GPUs that are here. Some of it twice, of two turns."""
    cases = dict.fromkeys(matrix(groups(ranks(2)), BACKENDS, WIDTHS))
    return [pytest.param(case, id=title(*case)) for case in cases]


@pytest.fixture(scope="module")
def compiled(request):
    """The kernels are in Triton's cache, or being late; nothing where none is asked for."""
    if not any("triton" in item.name or "[" not in item.name for item in request.session.items):
        return
    parts, spawn, end = JOBS * world(), multiprocessing.get_context("spawn"), time.monotonic() + COMPILING
    jobs = [spawn.Process(target=compile_part, args=(i, parts, i // JOBS)) for i in range(parts)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(max(0.0, end - time.monotonic()))
        job.terminate()


@pytest.mark.parametrize("case", parameters())
def test_split(case, compiled, gpu_ranks, record_property):
    found = gpu_ranks.run(gpu_ranks.size, split, *case)
    if isinstance(found[0], str):
        pytest.skip(found[0])
    record_property("errors", {n: max(errors[n] for errors, _ in found) for n in found[0][0]})
    assert not any(beyond for _, beyond in found), [beyond for _, beyond in found]


@pytest.mark.parametrize("group", TRANSPORTS)
@pytest.mark.parametrize("backend", ["cudnn", "flash", "flash_attn_4", "triton"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float8_e4m3fn, 0.05), (torch.float8_e5m2, 0.1)], ids=["e4m3", "e5m2"]
)
def test_keys_in_eight_bits_on_the_wire(gpu_ranks, dtype, limit, backend, group, record_property):
    """Near, and not as near as in bf16: the keys of other ranks did lose bits."""
    try:
        choose(Ask(torch.device("cuda"), HALVES[0], 4, 4, 128, 128), backend)
    except ring_la.RingLAError as e:
        pytest.skip(str(e))
    found = gpu_ranks.run(gpu_ranks.size, on_the_wire, backend, group, dtype)
    record_property("errors", found)
    assert FLOOR[HALVES[0]] < max(found) < limit


def test_deterministic(compiled, gpu_ranks):
    differ = gpu_ranks.run(gpu_ranks.size, deterministic)
    assert differ == [[]] * gpu_ranks.size


def test_a_stalled_peer(gpu_ranks):
    if gpu_ranks.size > torch.cuda.device_count():
        pytest.skip("ranks that share a GPU copy nothing, and NCCL's messages are given up: test_lookout.py")
    found = gpu_ranks.run(gpu_ranks.size, stalled_peer)
    gpu_ranks.stop()  # an exchange is half done
    assert set(found) == {f"no message from rank {gpu_ranks.size - 1}"}
