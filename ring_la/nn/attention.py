"""Softmax attention with rotary positions and fewer key heads than query heads.

Without earlier tokens this is `ring_la.attention` under any layout. With a cache and no layout it is decoding: one
dense attention to the cache, each document with its own length. With `LayerKeys` for a state keys stay on the rank that
read them, and one token more is decoded by all ranks together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..blockwise import by_element
from ..checks import check_flag, is_int
from ..errors import ArgumentError
from ..kernels.tokens.products import PreNorm, added_product, normed_products
from ..keystore import LayerKeys, decode_attention, read_attention
from ..keystore.static import StaticKeys
from ..softmax import attention
from .decoding import GroupedLayer, KVCache, KVRows, cache_of, decode, refuse_packed
from .layer import LayerCall, LayerOutput, divide, head_width, merge_heads, positions, split_heads
from .parts import RMSNorm, check_rotation, rotated
from .tokens import plain, plain_linear


class Attention(GroupedLayer):
    """Multi-head attention (Vaswani et al. 2017, §3.2) with grouped key heads (Ainslie et al. 2023, arXiv 2305.13245).

    Args:
        dim: D. num_heads: H. num_kv_heads: Hk, a divisor of H (default H). head_dim: K = V (default D / H).
        rope_base: base of the rotary positions; None: none.
        qk_norm: RMSNorm on each head of q and k before the rotation (Qwen3).
        gated: multiply the heads by sigmoid(x W_g) (Qwen3-Next; Qiu et al. 2025, arXiv 2505.06708).
        window: earlier tokens a token sees; −1: all.
    """

    same_bits, host_steps = True, False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_base: float | None = 10000.0,
        qk_norm: bool = False,
        gated: bool = False,
        window: int = -1,
    ) -> None:
        super().__init__(dim)
        K = head_width(dim, num_heads, head_dim)
        check_rotation(rope_base, K)
        check_flag("qk_norm", qk_norm)
        check_flag("gated", gated)
        if not is_int(window, -1):
            raise ArgumentError("window", "an int, −1 or more", repr(window))
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        divide("num_kv_heads", num_heads, self.num_kv_heads)
        self.rope_base, self.window = rope_base, window
        self.widths = [num_heads * K, self.num_kv_heads * K, self.num_kv_heads * K]
        self.qkv_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.gate_proj = nn.Linear(dim, num_heads * K, bias=False) if gated else None
        self.q_norm, self.k_norm = (RMSNorm(K) if qk_norm else nn.Identity() for _ in range(2))
        self.out_proj = nn.Linear(num_heads * K, dim, bias=False)

    def mix(self, x: Tensor, state: KVCache | None, call: LayerCall) -> LayerOutput:
        q, k, v = call.rows(self.qkv_proj, x).split(self.widths, -1)
        q = call.rows(self.q_norm, split_heads(q, self.num_heads))
        k, v = call.rows(self.k_norm, split_heads(k, self.num_kv_heads)), split_heads(v, self.num_kv_heads)
        if self.rope_base is not None:
            q, k = rotated(q, k, positions(x, None if state is None else state.length, call), self.rope_base, call)
        return self._attend(x, (q, k, v), state, call)

    def token(self, x: Tensor, norm: PreNorm, state: Any) -> Tensor | None:
        linears = [m for m in (self.qkv_proj, self.gate_proj) if m is not None]
        parts = plain(self, Attention) and isinstance(state, StaticKeys)
        if not (parts and isinstance(self.q_norm, nn.Identity) and plain_linear(x, *linears, self.out_proj)):
            return None
        if state.k.dtype != x.dtype or self.widths[0] // self.num_heads % 2:
            return None
        self.check(x, state, LayerCall(None, None, True, True))
        flat = x[:, 0]
        qkv, *gate = normed_products(flat, norm, linears)
        o = merge_heads(state.decode_turned(qkv, self.rope_base, self.window))[:, 0]
        o = _gated(gate[0], o) if gate else o
        return added_product(flat, o, self.out_proj)[:, None]

    def _attend(
        self,
        x: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        state: KVCache | KVRows | LayerKeys | StaticKeys | None,
        call: LayerCall,
        scale: float | None = None,
    ) -> LayerOutput:
        """Attention to these keys and to those of the state, gated by `x` and projected."""
        q, k, v = qkv
        if state is None:
            options: dict[str, Any] = dict(window=(self.window, -1), scale=scale)
            o = self._whole(q, k, v, layout=call.layout, cu_seqlens=call.cu_seqlens, **options)
            state = cache_of(k, v, call) if call.output_state else None
        elif isinstance(state, (KVRows, StaticKeys)):
            o = state.decode(q, k, v, self.window, scale)
        elif isinstance(state, LayerKeys):
            o = self._shared(qkv, state, call, scale)
        elif call.layout is None and not call.packed:
            state = state.extend(k, v)
            o = decode(q, state, self.window, scale)
        else:
            o, state = self._continue(qkv, state, call, scale)
        o = merge_heads(o)
        if self.gate_proj is not None:
            o = call.rows(_gated, call.rows(self.gate_proj, x), o)
        return LayerOutput(call.rows(self.out_proj, o), state if call.output_state else None)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of all tokens of a call to each other, or to those of `kv_layout`."""
        return attention(q, k, v, **options).o

    def _shared(
        self, qkv: tuple[Tensor, Tensor, Tensor], state: LayerKeys, call: LayerCall, scale: float | None
    ) -> Tensor:
        """Keys stay on their ranks: of a layout's tokens, or of one token of each sequence."""
        q, k, v = qkv
        if call.layout is not None:
            return read_attention(q, k, v, state, call.layout, window=self.window, scale=scale).o
        state.put(k, v)
        return decode_attention(q, state, window=self.window, scale=scale).o

    def _continue(
        self, qkv: tuple[Tensor, Tensor, Tensor], cache: KVCache, call: LayerCall, scale: float | None
    ) -> tuple[Tensor, KVCache | None]:
        """More tokens under a layout: the cache is put before them; on one rank as keys like theirs, which gives the
        bits of one call where that is asked for."""
        refuse_packed(cache, call)
        q, k, v = qkv
        layout = call.layout
        if layout is not None and layout.cp.deterministic and layout.cp.size == 1:
            cache = cache.extend(k, v)
            whole = layout.cp.layout(cache.k.shape[1], "contiguous")
            options: dict[str, Any] = dict(window=(self.window, -1), scale=scale)
            return self._whole(q, *cache[:2], layout=layout, kv_layout=whole, **options), cache
        joint: dict[str, Any] = dict(joint_k=cache.k, joint_v=cache.v, joint="front", scale=scale)
        o = attention(q, k, v, window=(self.window, -1), layout=call.layout, **joint).o
        if not call.output_state:
            return o, None
        new = cache_of(k, v, call)
        return o, cache.extend(new.k, new.v)


@by_element
def _gated(gate: Tensor, o: Tensor) -> Tensor:
    return torch.sigmoid(gate) * o
