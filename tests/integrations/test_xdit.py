"""xDiT's registry of attention functions, as its version 0.7 keys it and calls it."""

from __future__ import annotations

import enum

import pytest
import torch

from ring_la.errors import ArgumentError, RingLAError
from ring_la.integrations import xdit


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
