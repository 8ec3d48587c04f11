"""What the tests of the reference are given, and how close is close."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ring_la import reference

B, T, HK, H, K, V = 2, 13, 2, 4, 5, 3
SINGLE = {"rtol": 3e-5, "atol": 3e-5}
DOUBLE = {"rtol": 1e-11, "atol": 1e-11}


def close(got, want, **tolerance):
    torch.testing.assert_close(got.double(), want.double(), **(tolerance or DOUBLE))


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + seed))


def gate(*shape, seed=0):
    return F.logsigmoid(rand(*shape, seed=seed))


def bench(B=B, T=T, HK=HK, H=H):
    """Inputs for every recurrence: arguments by name, gates that differ per head and token."""
    q, k, v = rand(B, T, HK, K), F.normalize(rand(B, T, HK, K, seed=1), dim=-1), rand(B, T, H, V)
    g, gk, beta = gate(B, T, H), gate(B, T, H, K), rand(B, T, H, seed=2).sigmoid()
    removal = F.normalize(rand(B, T, H, K, seed=3), dim=-1)
    ab = {"a": -removal, "b": removal * rand(B, T, H, K, seed=4).sigmoid()}
    A, D, dt_bias = -rand(H).exp(), rand(H, seed=5), rand(H, seed=6)
    return {
        "linear_attention": dict(q=q, k=k, v=v),
        "retention": dict(q=q, k=k, v=v),
        "lightning_attention": dict(q=q, k=k, v=v),
        "simple_gla": dict(q=q, k=k, v=v, g=g),
        "mamba2": dict(x=v, dt=g, A=A, B=k, C=q, D=D, dt_bias=dt_bias, dt_softplus=True),
        "gla": dict(q=q, k=k, v=v, g=gk),
        "hgrn2": dict(q=q, g=gk[:, :, :HK], v=v),
        "delta_rule": dict(q=q, k=k, v=v, beta=beta),
        "gated_delta_rule": dict(q=q, k=k, v=v, g=g, beta=beta),
        "kda": dict(q=q, k=k, v=v, g=gk, beta=beta),
        "dplr_delta_rule": dict(q=q, k=k, v=v, g=gk, **ab),
        "rwkv7": dict(r=q, w=gk, k=k, v=v, **ab),
    }


RECURRENCES = sorted(bench())
PER_TOKEN = {"q", "k", "v", "g", "beta", "a", "b", "r", "w", "x", "dt", "B", "C"}


def run(name, arguments, **keywords):
    return getattr(reference, name)(**arguments, **keywords)


def cut(arguments, tokens, rows=slice(None)):
    return {name: x[rows, tokens] if name in PER_TOKEN else x for name, x in arguments.items()}


def numbers(*values, shape=(-1,)):
    return torch.tensor(values, dtype=torch.float64).view(shape)


def scalars(*values):
    return numbers(*values, shape=(1, -1, 1, 1))
