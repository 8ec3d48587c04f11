"""xDiT's registry of attention functions, as its version 0.7 keys it and calls it."""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from ring_la import ContextParallel
from ring_la.errors import ArgumentError, RingLAError, UnsupportedError
from ring_la.integrations import xdit
from ring_la.integrations.xdit.models import Contexts, ring_attention
from tests.support.attention_cases import error
from tests.support.pool import Ranks, group


class Backend(enum.Enum):
    """xDiT 0.7 keys its registry by such members, and selects by nothing else."""

    SDPA = "SDPA"
    SDPA_FLASH = "SDPA with FLASH backend"


def test_registry_of_members():
    """The default key is one that xDiT 0.7 can select: its runtime takes members of its enumeration alone."""
    registry = {Backend.SDPA: print, Backend.SDPA_FLASH: len}
    assert xdit.register(registry) is len
    assert registry == {Backend.SDPA: print, Backend.SDPA_FLASH: xdit.attention_function}
    assert xdit.register(registry, "sdpa") is print
    assert registry[Backend.SDPA] is xdit.attention_function
    with pytest.raises(ArgumentError, match=r"key: expected one of SDPA, SDPA_FLASH, got 'RING_LA'"):
        xdit.register(registry, "RING_LA")


def test_registry_entry_under_wan_and_padding():
    """What xDiT 0.7's Wan gives every call, and its declaration of padded keys, trimmed by USP or not."""
    q, k, v = (torch.randn(2, 3, 10, 8) for _ in range(3))
    wan = dict(thw=(1, 2, 5), spargeattn_simthreshold=0.3, spargeattn_cdfthreshold=0.92)
    wan |= dict(spargeattn_reorder_sequence=True, use_spargeattn_static_block_mask=True, vsa_block_size=128)
    wan |= dict(vsa_top_k=1, vsa_drop_rates=None, use_vsa_first_frame_mask=True, vsa_collect_density=False)
    packed = dict(indices_k=torch.arange(7), cu_seqlens_k=torch.tensor([0, 7], dtype=torch.int32), max_seqlen_k=7)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for more, keys in (
        (wan, 10),
        (dict(valid_kv_len=10), 10),
        (dict(valid_kv_len=7), 7),
        (packed | {"valid_kv_len": 7}, 7),
    ):
        out, _ = xdit.attention_function(q, k, v, dropout_p=0.0, is_causal=False, attention_kwargs=more)
        torch.testing.assert_close(out, sdpa(q, k[:, :, :keys], v[:, :, :keys]))
    for more in (
        dict(valid_kv_len=11),
        dict(valid_kv_len=0),
        packed,
        packed | dict(valid_kv_len=8),
        dict(vsa_h3_gate=q),
    ):
        with pytest.raises(RingLAError, match=r"attention_kwargs"):
            xdit.attention_function(q, k, v, dropout_p=0.0, is_causal=False, attention_kwargs=more)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", dict(query=None)),
        ("value", dict(value=torch.zeros(3, 10, 8))),
        ("attention_kwargs", dict(attention_kwargs=3)),
        ("attention_kwargs", dict(attention_kwargs={1: 2})),
        ("attention_kwargs", dict(attention_kwargs={"valid_kv_len": True})),
        ("attention_kwargs", dict(attention_kwargs={"valid_kv_len": 5, "max_seqlen_k": torch.tensor([5, 5])})),
    ],
)
def test_wrong_arguments_of_an_entry_are_named(name, change):
    q = torch.randn(2, 3, 10, 8)
    with pytest.raises(ArgumentError, match=rf"^{name}: expected"):
        xdit.attention_function(**dict(query=q, key=q, value=q, dropout_p=0.0, is_causal=False) | change)


@pytest.mark.parametrize(("name", "arguments"), [("registry", ([],)), ("key", ({Backend.SDPA: print}, None))])
def test_a_registry_that_cannot_select_is_refused(name, arguments):
    """An entry under None or a number was made, and never taken."""
    with pytest.raises(ArgumentError, match=rf"^{name}: expected"):
        xdit.register(*arguments)


def check_ring(rank: int) -> None:
    """What rank 1 alone gives xDiT's ring wrong is an error on both."""
    usp = types.SimpleNamespace(PROCESS_GROUP=types.SimpleNamespace(RING_PG=group(2)))
    ring, q = ring_attention(usp, Contexts()), torch.randn(1, 2, 6, 8)
    for name, change in (
        ("attention_kwargs", dict(attention_kwargs={"attn_mask": q})),
        ("joint_attn_kwargs", dict(joint_attn_kwargs=3)),
        ("joint_key", dict(joint_attn_kwargs={"joint_value": q})),
        ("joint_strategy", dict(joint_attn_kwargs={"joint_key": q, "joint_value": q, "joint_strategy": "none"})),
    ):
        with pytest.raises(RingLAError, match=f"{name}: expected"):
            ring(print, q, q, q, **(change if rank else {}))


def test_what_one_rank_of_a_ring_gives_wrong_both_refuse(ranks):
    ranks.run(2, check_ring, timeout=30)


# -- install -----------------------------------------------------------------------------------------------------------


def stand_ins() -> dict[str, types.ModuleType]:
    """The modules of xfuser 0.7 that `install` touches, as far as it does; groups are those of all ranks."""
    names = ("layers.usp", "long_ctx_attention.hybrid.attn_layer", "distributed")
    usp, sana, parallel = (types.ModuleType(f"xfuser.{n}") for n in names)
    usp.PROCESS_GROUP = types.SimpleNamespace(RING_PG=group(2), ULYSSES_PG=group(2))
    usp.ring_attn = usp._sdpa_all_to_all_single = None
    sana.xFuserSanaLinearLongContextAttention = type("Layer", (), {"forward": None, "use_kv_cache": True})
    parallel.get_sp_group = lambda: types.SimpleNamespace(device_group=group(2))
    parallel.get_pipeline_parallel_world_size = lambda: 1
    return {
        "xfuser.model_executor.layers.usp": usp,
        "xfuser.core.long_ctx_attention.hybrid.attn_layer": sana,
        "xfuser.core.distributed": parallel,
    }


def check_installed(rank: int) -> dict[str, float | str]:
    """Errors of what is installed, called as `usp.USP` and the Sana processor call it."""
    modules = stand_ins()
    sys.modules.update(modules)
    try:
        usp, sana, _ = modules.values()
        back = xdit.install()
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, 2, 10, 8)
        joint = torch.randn(3, 1, 2, 3, 8)
        mine = slice(5 * rank, 5 * rank + 5)
        given = dict(joint_strategy="front", joint_key=joint[0], joint_value=joint[1], step=0, total_steps=2)
        wide = torch.cat([joint[2], q[:, :, mine]], 2)  # USP puts joint queries beside the others before it calls
        for _ in range(2):  # of a shape's second call the layout is there
            with mock.patch.object(
                ContextParallel, "layout", autospec=True, side_effect=ContextParallel.layout
            ) as made:
                o = usp.ring_attn(None, wide, k[:, :, mine], v[:, :, mine], joint_attn_kwargs=dict(given))
        whole = F.scaled_dot_product_attention(wide, torch.cat([joint[0], k], 2), torch.cat([joint[1], v], 2))
        found: dict[str, float | str] = {
            "ring": error(o, whole),
            "layouts made anew": float(made.call_count),
        }
        swapped = usp._sdpa_all_to_all_single(torch.arange(8.0).view(4, 2) + 10 * rank)
        want = torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + 4 * rank
        found["exchange"] = error(swapped, torch.cat([want, want + 10]))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        layer = sana.xFuserSanaLinearLongContextAttention()
        o = layer.forward(None, q[:, mine], k[:, mine], v[:, mine])
        q, k, v = q.relu().double(), k.relu().double(), v.double()
        scores = torch.einsum("bthk,bshk->bhts", q, k)
        whole = torch.einsum("bhts,bshv->bthv", scores / scores.sum(-1, keepdim=True), v).flatten(2)
        found["sana"] = error(o, whole[:, mine])
        for words, call in (
            ("valid_kv_len", lambda: usp.ring_attn(None, *[q.mT] * 3, attention_kwargs=dict(valid_kv_len=3))),
            ("dropout_p", lambda: layer.forward(None, q, k, v, dropout_p=0.1)),
        ):
            try:
                found[words] = call() and "accepted"
            except UnsupportedError as e:
                found[words] = 0.0 if words in str(e) else str(e)
        back()
        found["back"] = 0.0 if usp.ring_attn is None and layer.forward is None else "not as before"
        return found
    finally:
        for name in modules:
            del sys.modules[name]


def test_installed_where_models_call(ranks):
    """On stand-ins: xfuser 0.7 itself wants a GPU to have groups."""
    for found in ranks.run(2, check_installed):
        assert all(isinstance(e, float) and e < 1e-5 for e in found.values()), found


@pytest.mark.parametrize("error", [ImportError("No module named 'xfuser'"), NotImplementedError("No Accelerators")])
def test_install_without_xfuser_or_a_gpu(error):
    """xfuser 0.7, the least that the extra installs, raises NotImplementedError where it finds no GPU."""
    with mock.patch("importlib.import_module", side_effect=error):
        with pytest.raises(UnsupportedError, match=rf"xfuser: expected 0\.7, installed, .*: {error}"):
            xdit.install()
    assert 'xfuser = ["xfuser>=0.7"]' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xfuser") is None, reason="xfuser is not installed")
def test_the_installed_xfuser():
    """Its USP, Sana layer, Wan and Flux, told of a GPU, in ranks of their own: they keep what they import."""
    from .real_xdit import check

    ranks = Ranks(2)
    try:
        for found in ranks.run(2, check, 2, None, timeout=300):
            assert len(found) == 9
            assert all(e < 1e-5 for e in found.values()), found
    finally:
        ranks.stop()
