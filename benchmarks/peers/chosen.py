"""Other libraries' attention to chosen keys, as `benchmarks.chosen` calls them: functions of its tensors.

FlashMLA has no wheel: `pip download flash-mla` finds flash_mla-1.0.0.dev0.tar.gz, 6 kB without kernels, and stops at
"Getting requirements to build wheel: ModuleNotFoundError: No module named 'torch'". FLA's MoBA needs flash-attn. What
is not installed raises ImportError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Function = Callable[..., Tensor]


def flash_mla(chosen: Tensor, T: int, scale: float) -> Function:
    """FlashMLA's sparse prefill, which has no backward, of queries that were taken to the latents."""
    from flash_mla import flash_mla_sparse_fwd  # type: ignore[import-not-found]

    rows = torch.where(chosen < 0, T, chosen)[0]

    def call(q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        if q.shape[2] % 64:
            raise ValueError(f"it takes heads by 64, not {q.shape[2]}")
        N, L = w_uk.shape[1:]
        low = torch.cat([torch.einsum("bthd,hdl->bthl", q[..., :N], w_uk), q[..., N:]], -1)
        keys = torch.cat([latent, k_rope], -1)[0, :, None]
        o = flash_mla_sparse_fwd(low[0], keys, rows, scale, L)[0]
        return torch.einsum("thl,hvl->thv", o, w_uv)[None]

    return call


def expanded(q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """PyTorch's attention to all keys, made of latents."""
    k, v = (torch.einsum("btl,hnl->bhtn", latent, w) for w in (w_uk, w_uv))
    k = torch.cat([k, k_rope[:, None].expand(-1, k.shape[1], -1, -1)], -1)
    return scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)


def all_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same of keys of their own."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def fla_nsa(numbers: Tensor, T: int, H: int, size: int) -> Function:
    """FLA's NSA, of its branches the chosen blocks ``[1, T, Hk, S]`` alone."""
    from fla.ops.nsa import parallel_nsa

    gate = torch.ones(1, T, H, device="cuda", dtype=torch.bfloat16)
    none = -(-T // size)
    at, counts = torch.where(numbers < 0, none, numbers).sort(-1).values.long(), (numbers >= 0).sum(-1)
    return lambda q, k, v: parallel_nsa(
        q, k, v, g_slc=gate, block_indices=at, block_counts=counts, block_size=size, window_size=0
    )


def flex(numbers: Tensor, T: int, H: int, size: int) -> Function:
    """PyTorch's FlexAttention, compiled. Its mask knows each query's blocks; as queries choose apart, no tile of 128
    by 128 up to the diagonal is empty, so the tiles are written down and not found by a mask of T by T."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    heads, tiles = numbers.shape[2], -(-T // 128)
    seen = torch.zeros(heads, T, T // size + 1, dtype=torch.bool, device="cuda")
    seen.scatter_(2, torch.where(numbers < 0, T // size, numbers)[0].transpose(0, 1).long(), True)
    counts = torch.arange(1, tiles + 1, device="cuda", dtype=torch.int32)[None, None]
    at = torch.arange(tiles, device="cuda", dtype=torch.int32).expand(1, 1, tiles, tiles).contiguous()
    mask = BlockMask.from_kv_blocks(
        counts,
        at,
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, i, j: (i >= j) & seen[h // (H // heads), i, j // size],
        seq_lengths=(T, T),
    )
    call = torch.compile(flex_attention)
    return lambda *x: call(*(t.transpose(1, 2) for t in x), block_mask=mask, enable_gqa=True).transpose(1, 2)


def fla_moba(T: int, size: int, topk: int) -> Function:
    """FLA's MoBA, which chooses its blocks itself."""
    from fla.ops.moba import parallel_moba

    cu = torch.tensor([0, T], device="cuda", dtype=torch.int32)
    return lambda q, k, v: parallel_moba(q, k, v, cu, T, size, topk)
