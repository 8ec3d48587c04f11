"""Attention whose keys and values are made of one small latent a token.

Without earlier tokens this is `ring_la.mla` under any layout: what travels is the latent. The cache is the latents and
rotary parts; decoding is absorbed, so that every head reads them as they are. With `LayerKeys` for a state they stay on
the rank that read them, and all ranks decode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..blockwise import fixed
from ..checks import check_above_zero
from ..errors import ArgumentError
from ..keystore import KeySize, LayerKeys, decode_latents, read_latents
from ..keystore.static import StaticKeys
from ..softmax import attention, mla
from .decoding import KeyedLayer, KVCache, KVRows, cache_of, decode, refuse_packed
from .layer import LayerCall, LayerOutput, head_width, merge_heads, positions, positive, split_heads
from .parts import RMSNorm, rotated


class MultiheadLatentAttention(KeyedLayer):
    """Multi-head Latent Attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, §2.1, eq. 9 to 19).

    Args:
        dim: D. num_heads: H. head_dim: N, channels of a head's query and key that do not rotate (default D / H).
        rope_dim: R, rotary channels, of one key for all heads (default N / 2, even). value_dim: V (default N).
        kv_rank: L, the latent's width (default 4 N). q_rank: that of the queries' latent; None: queries are made of x.
        rope_base: base of the rotary positions.
    """

    same_bits, host_steps = True, False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        rope_dim: int | None = None,
        value_dim: int | None = None,
        kv_rank: int | None = None,
        q_rank: int | None = None,
        rope_base: float = 10000.0,
    ) -> None:
        super().__init__(dim)
        N = head_width(dim, num_heads, head_dim)
        R = positive("rope_dim", 2 * -(-N // 4) if rope_dim is None else rope_dim)
        if R % 2:
            raise ArgumentError("rope_dim", "an even number of channels", R)
        check_above_zero("rope_base", rope_base)
        V = positive("value_dim", N if value_dim is None else value_dim)
        L = positive("kv_rank", 4 * N if kv_rank is None else kv_rank)
        self.num_heads, self.rope_base = num_heads, rope_base
        self.widths, self.q_widths = [L, R], [N, R]
        from_dim = dim if q_rank is None else positive("q_rank", q_rank)
        self.q_down = None if q_rank is None else nn.Sequential(nn.Linear(dim, q_rank, bias=False), RMSNorm(q_rank))
        self.q_proj = nn.Linear(from_dim, num_heads * (N + R), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(dim, L + R, bias=False), RMSNorm(L)
        self.k_up, self.v_up = (nn.Parameter(torch.empty(num_heads, n, L).uniform_(-1, 1) / L**0.5) for n in (N, V))
        self.out_proj = nn.Linear(num_heads * V, dim, bias=False)

    @property
    def key_size(self) -> KeySize:
        """What a token's latent and rotary part take, for a `KeyStore`."""
        return KeySize(1, sum(self.widths), 0)

    @property
    def fixed_size(self) -> KeySize:
        """Latents are the keys in `StaticKeys`, and rotary parts stand in the place of values."""
        return KeySize(1, *self.widths)

    def fixed_parts(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        latent, rotary = k.split(self.widths, -1)
        return latent, rotary

    def _check_cache(self, x: Tensor, cache: KVCache, call: LayerCall) -> None:
        expected, got = [x.shape[0], 1, sum(self.widths)], [cache.k.shape[0], *cache.k.shape[2:]]
        if not call.packed and got != expected:
            raise ArgumentError("state", f"latents of {expected[0]} documents, [N, S, 1, {expected[2]}]", got)

    def mix(self, x: Tensor, state: KVCache | KVRows | LayerKeys | StaticKeys | None, call: LayerCall) -> LayerOutput:
        at = positions(x, None if state is None else state.length, call)
        q, key, k_up, v_up = self._made(self._source(x, call), x, at, call)
        latent, k_rope = key[:, :, 0].split(self.widths, -1)
        if state is None:
            where: dict[str, Any] = dict(layout=call.layout, cu_seqlens=call.cu_seqlens)
            o = mla(q, latent, k_rope, k_up, v_up, **where).o
            state = cache_of(key, key[..., :0], call) if call.output_state else None
        elif isinstance(state, LayerKeys) and call.layout is not None:
            o = read_latents(q, latent, k_rope, state, call.layout, k_up, v_up).o
        elif isinstance(state, LayerKeys):
            state.put(key)
            o = decode_latents(q, state, k_up, v_up).o
        elif isinstance(state, StaticKeys):
            still, turning = q.split(self.q_widths, -1)
            lowered, parts = torch.einsum("bthn,hnl->bthl", still, k_up), self.fixed_parts(key, key[..., :0])
            o = state.decode_latents(lowered, turning, *parts, scale=q.shape[-1] ** -0.5)
            o = torch.einsum("bthl,hvl->bthv", o, v_up)
        elif isinstance(state, KVRows) or (call.layout is None and not call.packed):
            o, state = self._decode(q, key, state, k_up, v_up)
        else:
            o, state = self._continue(q, key, state, call)
        return LayerOutput(call.rows(self.out_proj, merge_heads(o)), state if call.output_state else None)

    def _source(self, x: Tensor, call: LayerCall) -> Tensor:
        """What queries are made of."""
        return x if self.q_down is None else call.rows(self.q_down, x)

    def _made(self, source: Tensor, x: Tensor, at: Tensor, call: LayerCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries ``[B, T, H, N + R]``, latents and rotary parts ``[B, T, 1, L + R]``, and the up-projections."""
        q = split_heads(call.rows(self.q_proj, source), self.num_heads)
        still, turning = q.split(self.q_widths, -1)
        latent, k_rope = call.rows(self.kv_down, x).split(self.widths, -1)
        turned, k_rope = rotated(turning, k_rope[:, :, None], at, self.rope_base, call)
        q = torch.cat([still, turned], -1)
        key = torch.cat([call.rows(self.kv_norm, latent)[:, :, None].to(q.dtype), k_rope.to(q.dtype)], -1)
        return q, key, self.k_up.to(q.dtype), self.v_up.to(q.dtype)

    def _lowered(self, q: Tensor, k_up: Tensor) -> Tensor:
        """Queries taken to the latents, ``[B, T, H, L + R]``."""
        still, turning = q.split(self.q_widths, -1)
        return torch.cat([torch.einsum("bthn,hnl->bthl", still, k_up), turning], -1)

    def _decode(
        self, q: Tensor, key: Tensor, state: KVCache | KVRows, k_up: Tensor, v_up: Tensor
    ) -> tuple[Tensor, KVCache | KVRows]:
        """The documents' next tokens, absorbed: queries are taken to the latents, and results back."""
        L, absorbed = self.widths[0], self._lowered(q, k_up)
        absorbed = absorbed * (absorbed.shape[-1] / q.shape[-1]) ** 0.5  # kernels scale by the width they see
        if isinstance(state, KVRows):
            o = state.decode(absorbed, key, key[..., :0], width=L)
        else:
            state = state.extend(key, key[..., :0])
            o = decode(absorbed, KVCache(state.k, state.k[..., :L], state.empty), -1)
        return torch.einsum("bthl,hvl->bthv", o, v_up), state

    def _continue(self, q: Tensor, key: Tensor, cache: KVCache, call: LayerCall) -> tuple[Tensor, KVCache | None]:
        """More tokens under a layout: the cache is put before them, with keys and values written out."""
        refuse_packed(cache, call)
        layout = call.layout
        if fixed(layout) and layout.cp.size == 1:  # the bits of one call
            cache = cache.extend(key, key[..., :0])
            latent, rotary = cache.k[:, :, 0].split(self.widths, -1)
            whole = layout.cp.layout(cache.k.shape[1], "contiguous")
            k_up, v_up = self.k_up.to(q.dtype), self.v_up.to(q.dtype)
            return mla(q, latent, rotary, k_up, v_up, layout=layout, kv_layout=whole).o, cache
        (k, v), (joint_k, joint_v) = self._written_out(key), self._written_out(cache.k.to(key.dtype))
        joint: dict[str, Any] = dict(joint_k=joint_k, joint_v=joint_v, joint="front")
        o = attention(q, k, v, layout=call.layout, **joint).o
        if not call.output_state:
            return o, None
        new = cache_of(key, key[..., :0], call)
        return o, cache.extend(new.k, new.v)

    def _written_out(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[B, T, H, N + R]`` and values ``[B, T, H, V]`` of latents and rotary parts ``[B, T, 1, L + R]``."""
        latent, k_rope = key[:, :, 0].split(self.widths, -1)
        k = torch.einsum("btl,hnl->bthn", latent, self.k_up.to(key.dtype))
        v = torch.einsum("btl,hvl->bthv", latent, self.v_up.to(key.dtype))
        return torch.cat([k, k_rope[:, :, None].expand(-1, -1, self.num_heads, -1)], -1), v
