"""Split softmax attention of ring-flash-attn, yunchang, Diffusers and PyTorch, as their own documentation calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ring_la.testing import Call, Refused

from .flash_attn_on_cpu import install


def _three(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return call.tensors["q"], call.tensors["k"], call.tensors["v"]


def _unpacked(call: Call) -> None:
    if call.cu_seqlens is not None:
        raise Refused("this function takes no packed documents")


def ring_flash_attn(call: Call) -> Tensor:
    """ring-flash-attn's dense functions, and its llama3 one for packed documents."""
    install()
    import ring_flash_attn as peer

    q, k, v = _three(call)
    causal = call.options.get("causal", True)
    if call.cu_seqlens is not None:
        if call.kind != "contiguous":
            raise Refused("packed documents are contiguous there")
        cu = torch.tensor(call.cu_seqlens, dtype=torch.int32, device=q.device)
        prepared = peer.llama3_flash_attn_prepare_cu_seqlens(cu, causal, call.rank, call.size)
        cu_q, cu_k, longest_q, longest_k, own = prepared
        return peer.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], cu_q, cu_k, longest_q, longest_k, heads_k_stride=1, local_k_slice=own, causal=causal,
            window_size=_window(call),
            group=call.group,
        )[None]  # fmt: skip
    names = {"contiguous": "ring", "zigzag": "zigzag_ring", "striped": "stripe"}
    function = getattr(peer, f"{names[call.kind]}_flash_attn_func")
    return function(q, k, v, causal=causal, window_size=_window(call), group=call.group)


def _window(call: Call) -> tuple[int, int]:
    left, _ = call.options.get("window", (-1, -1))
    return (left, 0) if left >= 0 else (-1, -1)


def in_each_document(seq_len: int, size: int, cu_seqlens: tuple[int, ...] | None) -> list[Tensor]:
    """Every document cut into equal parts, one a rank, as the varlen rings want it."""
    cu = (0, seq_len) if cu_seqlens is None else cu_seqlens
    parts: list[list[Tensor]] = [[] for _ in range(size)]
    for a, b in zip(cu, cu[1:]):
        for own, part in zip(parts, torch.arange(a, b).tensor_split(size)):
            own.append(part)
    return [torch.cat(own) for own in parts]


def zigzag_in_each_document(seq_len: int, size: int, cu_seqlens: tuple[int, ...] | None) -> list[Tensor]:
    """Every document zigzag by itself."""
    halves = in_each_document(seq_len, 2 * size, cu_seqlens)
    cu = (0, seq_len) if cu_seqlens is None else cu_seqlens
    out = []
    for r in range(size):
        both = torch.cat([halves[r], halves[2 * size - 1 - r]])
        document = torch.searchsorted(torch.tensor(cu[1:]), both, right=True)
        out.append(both[(document * 2 * seq_len + both).argsort()])
    return out


def _varlen(call: Call, module: str) -> Tensor:
    install()
    import importlib

    peer = importlib.import_module(module)
    q, k, v = _three(call)
    zigzag = call.kind is zigzag_in_each_document or getattr(call.kind, "__name__", "").startswith("zigzag")
    cu = (0, call.seq_len) if call.cu_seqlens is None else call.cu_seqlens
    lengths = [b - a for a, b in zip(cu, cu[1:])]
    if any(n % (call.size * (2 if zigzag else 1)) for n in lengths) or q.shape[0] > 1:
        raise Refused("lengths of documents that the ranks do not divide")
    local = torch.tensor([c // call.size for c in cu], dtype=torch.int32, device=q.device)
    function = getattr(peer, f"{'zigzag_' if zigzag else ''}ring_flash_attn_varlen_func")
    return function(
        q[0], k[0], v[0], local, max(lengths) // call.size, causal=call.options.get("causal", True), group=call.group
    )[None]


def ring_flash_attn_varlen(call: Call) -> Tensor:
    """ring-flash-attn's varlen rings."""
    return _varlen(call, "ring_flash_attn")


def yunchang_varlen(call: Call) -> Tensor:
    """yunchang's varlen rings."""
    return _varlen(call, "yunchang.ring")


def yunchang(call: Call) -> Tensor:
    """yunchang's rings."""
    install()
    _unpacked(call)
    import yunchang.ring as peer

    q, k, v = _three(call)
    names = {"contiguous": "ring", "zigzag": "zigzag_ring", "striped": "stripe"}
    function = getattr(peer, f"{names[call.kind]}_flash_attn_func")
    causal = call.options.get("causal", True)
    return function(q, k, v, causal=causal, window_size=_window(call), group=call.group)


def yunchang_ulysses(call: Call) -> Tensor:
    """yunchang's UlyssesAttention."""
    install()
    _unpacked(call)
    import yunchang.ulysses as peer
    from yunchang.kernels import AttnType

    kind = AttnType.FA if call.device.type == "cuda" else AttnType.TORCH_MATH
    layer = peer.UlyssesAttention(call.group, attn_type=kind)
    return layer(*_three(call), causal=call.options.get("causal", True))


def _diffusers(call: Call, backend: str, **degrees: object) -> Tensor:
    _unpacked(call)
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from torch.distributed.device_mesh import init_device_mesh

    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**degrees))  # type: ignore[arg-type]
    context = config.context_parallel_config
    mesh = init_device_mesh(call.device.type, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config.setup(call.rank, call.size, call.device, mesh=mesh)
    options = {"is_causal": call.options.get("causal", True)}
    q, k, v = _three(call)
    grouped = q.shape[2] != k.shape[2]
    return dispatch_attention_fn(q, k, v, **options, enable_gqa=grouped, backend=backend, parallel_config=config)


def diffusers_ulysses(call: Call) -> Tensor:
    """Diffusers' Ulysses."""
    return _diffusers(call, "native", ulysses_degree=call.size)


def diffusers_ulysses_anything(call: Call) -> Tensor:
    """Diffusers' Ulysses for any length and number of heads."""
    return _diffusers(call, "native", ulysses_degree=call.size, ulysses_anything=True)


def diffusers_ring(call: Call) -> Tensor:
    """Diffusers' ring, with PyTorch's flash kernel."""
    return _diffusers(call, "_native_flash", ring_degree=call.size)


def diffusers_ring_anything(call: Call) -> Tensor:
    """Diffusers' ring for any length."""
    return _diffusers(call, "_native_flash", ring_degree=call.size, ring_anything=True)


def torch_context_parallel(call: Call) -> Tensor:
    """PyTorch's context_parallel, which Accelerate and Transformers' Trainer use, around its own attention."""
    _unpacked(call)
    q, k, v = (x.transpose(1, 2) for x in _three(call))
    return _Within.apply(call, q, k, v).transpose(1, 2)


@contextmanager
def _within(call: Call) -> Iterator[None]:
    """It wants a buffer of the whole sequence, which it cuts while inside."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    _cp_options.enable_load_balance = call.kind == "zigzag"
    mesh = init_device_mesh(call.device.type, (call.size,))
    places = torch.arange(call.seq_len, device=call.device)
    flash = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    with context_parallel(mesh, buffers=[places], buffer_seq_dims=[0]), flash:
        yield


class _Within(torch.autograd.Function):
    """Attention under context_parallel, whose backward has to be inside, too."""

    @staticmethod
    def forward(ctx: Any, call: Call, *given: Tensor) -> Tensor:
        ctx.call, ctx.given = call, [x.detach().requires_grad_() for x in given]
        q, k, v = ctx.given
        with _within(call), torch.enable_grad():
            causal = call.options.get("causal", True)
            grouped = q.shape[1] != k.shape[1]
            ctx.o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return ctx.o.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with _within(ctx.call):
            return None, *torch.autograd.grad(ctx.o, ctx.given, grads[0])
