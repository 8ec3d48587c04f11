"""Options of layers: what makes no layer is refused by name."""

from __future__ import annotations

import pytest

from ring_la import ArgumentError
from ring_la.models import SwiGLU
from ring_la.nn import LAYERS, MixtureOfExperts, RMSNorm
from tests.nn.cases import DIM, NAMES, OPTIONS, make

BAD_OPTIONS = [
    ("gdn", dict(dim=0), "dim"),
    ("gdn", dict(num_heads=2.0), "num_heads"),
    ("gdn", dict(conv_width=0), "conv_width"),
    ("gdn", dict(head_dim=0), "head_dim"),
    ("gdn", dict(num_value_heads=6), "num_value_heads: expected a multiple of num_heads = 4, got 6"),
    ("hgrn2", dict(num_heads=0), "num_heads"),
    ("mamba2", dict(num_heads=None, head_dim=0), "head_dim"),
    ("attention", dict(num_kv_heads=0), "num_kv_heads"),
    ("mla", dict(rope_dim=3), "rope_dim"),
    ("nsa", dict(length=24), "length"),
    ("dsa", dict(index_dim=1), "index_dim"),
    ("dsa", dict(index_loss=-1), "index_loss"),
    ("moba", dict(block=0), "block"),
    ("dsa", dict(index_loss=float("nan")), "index_loss"),
    ("attention", dict(window=-5), "window"),
    ("attention", dict(window=True), "window"),
    ("attention", dict(num_kv_heads=True), "num_kv_heads"),
    ("mamba2", dict(num_heads=True), "num_heads"),
    ("rwkv7", dict(layer_idx=True, num_layers=3), "layer_idx"),
    ("attention", dict(head_dim=3), "head_dim"),  # rotation pairs channels
    ("retention", dict(head_dim=3), "head_dim"),
    ("lightning", dict(layer_idx=3, num_layers=3), "layer_idx"),
    ("rwkv7", dict(layer_idx=3, num_layers=3), "layer_idx"),
]


@pytest.mark.parametrize(("name", "options", "named"), BAD_OPTIONS)
def test_bad_options_are_named(name, options, named):
    with pytest.raises(ArgumentError, match=rf"^{named}\b"):
        LAYERS[name](**({"dim": DIM, "num_heads": 4} | options))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [*((RMSNorm, dict(dim=d)) for d in (0, 4.0, None)), *((RMSNorm, dict(dim=4, eps=e)) for e in (-1, "x", None)),
     *((SwiGLU, {"dim": 4, "hidden": 8} | w) for w in ({"dim": "4"}, {"hidden": 0}, {"hidden": 8.0})),
     (MixtureOfExperts, dict(dim=4, hidden=8, shared_hidden=8.0))],
)  # fmt: skip
def test_sizes_of_parts_are_named(part, wrong):
    with pytest.raises(ArgumentError, match=rf"^({'|'.join(wrong)}): expected"):
        part(**wrong)


WRONG = [
    ("attention", {"rope_base": -1}),
    ("attention", {"rope_base": float("nan")}),
    ("attention", {"qk_norm": "no"}),
    ("attention", {"gated": 0}),
    ("mla", {"rope_base": 0}),
    ("moba", {"qk_norm": None}),
    ("retention", {"rope_base": "x"}),
    ("lightning", {"log_decay": 0.5}),
    ("gla", {"temperature": -1}),
    ("gla", {"gate_rank": 0}),
    ("gsa", {"temperature": 0}),
    ("hgrn2", {"lower_bound": None}),
    ("hgrn", {"lower_bound": "x"}),
    ("rwkv6", {"mix_rank": 0}),
    ("rwkv6", {"decay_rank": 1.5}),
    ("mamba2", {"expand": 0}),
    ("mamba2", {"state_dim": 0}),
    ("mamba2", {"dt_range": (0.1, 0.001)}),
    ("mamba3", {"expand": 1.5}),
    ("mamba3", {"turned": None}),
    ("mlstm", {"key_dim": 0}),
    ("ttt", {"rate": float("nan")}),
    ("gdn", {"negative_eigenvalues": "no"}),
    ("gdn", {"head_dim": True}),
    ("linear_attention", {"causal": None}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=lambda x: str(x))
def test_options_that_make_no_layer_are_refused(name, wrong):
    """Some made NaN, gates that grow, or a layer without channels; others were errors of the first call."""
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}: expected"):
        make(name, **wrong)


def test_options_name_layers():
    assert set(OPTIONS) <= set(NAMES)
