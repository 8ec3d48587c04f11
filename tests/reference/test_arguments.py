"""The reference names bad arguments, and takes those of the public functions."""

from __future__ import annotations

import inspect

import pytest

import ring_la
from ring_la import reference
from ring_la.errors import ArgumentError

from .inputs import (
    HK,
    B,
    H,
    K,
    T,
    V,
    bench,
    gate,
    rand,
    run,
)


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"q": rand(B, T, HK, K + 1)}, "k"),
        ({"k": rand(B, T, HK + 1, K)}, "k"),
        ({"v": rand(B, T, 3, V)}, "v"),
        ({"g": gate(B, T, H)}, "g"),
        ({"beta": rand(B, T + 1, H)}, "beta"),
        ({"initial_state": rand(B, H, V, K)}, "initial_state"),
        ({"cu_seqlens": [0, T]}, "cu_seqlens"),
        ({"layout": object()}, "layout"),
        ({"mode": "fast"}, "mode"),
        ({"backend": "triton"}, "backend"),
    ],
)
def test_recurrences_name_the_bad_argument(keywords, name):
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        run("kda", {**bench()["kda"], **keywords})


@pytest.mark.parametrize("bounds", [[0], [1, T], [0, T - 1], [0, 5, 4, T]])
def test_offsets_must_span_the_tokens_in_order(bounds):
    x = bench(B=1)
    for call in (
        lambda: run("gla", x["gla"], cu_seqlens=bounds),
        lambda: reference.attention(rand(1, T, 1, 2), rand(1, T, 1, 2), rand(1, T, 1, 2), cu_seqlens=bounds),
        lambda: reference.token_shift(rand(1, T, 2), cu_seqlens=bounds),
        lambda: reference.short_conv(rand(1, T, 2), rand(2, 3), cu_seqlens=bounds),
    ):
        with pytest.raises(ArgumentError, match=r"^cu_seqlens: expected "):
            call()


def test_mamba2_and_rwkv7_name_their_own_arguments():
    mamba, rwkv = bench()["mamba2"], bench()["rwkv7"]
    for bad, name in (({"B": rand(B, T, 1, K)}, "B"), ({"A": rand(H + 1)}, "A"), ({"D": rand(H + 1)}, "D")):
        with pytest.raises(ArgumentError, match=f"^{name}: expected "):
            run("mamba2", {**mamba, **bad})
    with pytest.raises(ArgumentError, match=r"^w: expected "):
        run("rwkv7", {**rwkv, "w": rand(B, T, H, 1)})


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"window": (-2, 0)}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"sinks": rand(3)}, "sinks"),
        ({"alibi_slopes": rand(3)}, "alibi_slopes"),
        ({"joint": "front"}, "joint"),
        ({"joint_k": rand(1, 2, 1, 2), "joint_v": rand(1, 2, 1, 2)}, "joint"),
        ({"joint": "front", "joint_k": rand(1, 2, 1, 2), "joint_v": rand(1, 3, 1, 2)}, "joint_v"),
        ({"layout": object()}, "layout"),
    ],
)
def test_attention_names_the_bad_argument(keywords, name):
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        reference.attention(rand(1, 3, 2, 2), rand(1, 3, 1, 2), rand(1, 3, 1, 2), **keywords)


def test_other_bad_arguments():
    for bad, name in (
        (lambda: reference.lightning_attention(*bench()["retention"].values(), layer_idx=2, num_layers=2), "layer_idx"),
        (lambda: reference.retention(*bench()["retention"].values(), g=rand(3)), "g"),
        (lambda: reference.short_conv(rand(1, 3, 2), rand(3, 4)), "weight"),
        (lambda: reference.short_conv(rand(1, 3, 2), rand(2, 4), activation="relu"), "activation"),
        (lambda: reference.token_shift(rand(1, 3, 2), initial_state=rand(1, 3)), "initial_state"),
        (lambda: reference.grouped_gemm(rand(4, 3), rand(2, 3, 2), [2, 1]), "group_sizes"),
        (lambda: reference.grouped_gemm(rand(4, 3), rand(2, 4, 2), [2, 2]), "b"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected "):
            bad()
    with pytest.raises(TypeError, match=r"gla\(\).*head_first"):
        run("gla", bench()["gla"], head_first=True)


CHOICES = {"strategy", "kv_layout", "kv_comm_dtype", "dropout_seed", "in_place", "form", "output_latents"}
"""Arguments of public functions that choose how a result is made, not what it is."""


@pytest.mark.parametrize("name", [n for n in reference.__all__ if n != "grouped_gemm"])
def test_arguments_are_those_of_the_public_function(name):
    """In the same order and kind, so that a positional call means the same."""
    public, ours = (inspect.signature(getattr(of, name)).parameters for of in (ring_la, reference))
    shared = [(n, p.kind) for n, p in public.items() if n not in CHOICES]
    assert shared == [(n, p.kind) for n, p in ours.items() if n in public]
    assert ours.keys() - public.keys() <= {"backend"}
