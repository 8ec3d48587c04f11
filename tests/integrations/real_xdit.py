"""xDiT's own `usp.USP`, Sana layer, Wan and Flux with ours inside (`ring_la.integrations.xdit.install`).

    python -m tests.integrations.real_xdit [CHECKOUT]

of the xfuser that is installed, or of a checkout. Prints each error beside attention, or the model of Diffusers, of one
process, on 2 and 4 CPU processes over gloo; exits with the number of wrong ones. xDiT imports on GPUs alone: PyTorch is
told that there is one, and what is not installed stands empty. Its groups and its runtime's state are set, not made.
`test_xdit.py` runs two ranks of it where xfuser is installed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ring_la.integrations import xdit
from tests.support.attention_cases import error
from tests.support.pool import Ranks

GPU = types.SimpleNamespace(gcnArchName="", major=9, minor=0)
SAYS = dict(is_available=True, current_device=0, get_device_name="a GPU", get_device_capability=(9, 0), device_count=1)
WRAPPERS = "xfuser.model_executor.models.transformers.transformer"
MODELS = {"wan": "xFuserWanTransformer3DWrapper", "flux": "xFuserFlux1Transformer2DWrapper"}


class Empty(types.ModuleType):
    """In place of a package that is not there."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def imported(checkout: Path | None) -> types.ModuleType:
    """The module `usp` of xDiT."""
    if checkout is not None:
        sys.path.insert(0, str(checkout))
    answers: dict[str, Any] = {name: lambda *_, said=said: said for name, said in SAYS.items()}
    answers["get_device_properties"] = lambda *_: GPU
    with mock.patch.multiple(torch.cuda, **answers), mock.patch.object(torch.version, "cuda", "13.0"):
        while True:
            try:
                importlib.import_module("xfuser.core.fast_attention")
                for name in MODELS:
                    importlib.import_module(f"{WRAPPERS}_{name}")
                return importlib.import_module("xfuser.model_executor.layers.usp")
            except ModuleNotFoundError as e:
                for name in [n for n in sys.modules if n.split(".")[0] == "xfuser"]:
                    del sys.modules[name]
                sys.modules[str(e.name)] = Empty(str(e.name))


def settle(usp: types.ModuleType, ulysses: int, ring: int) -> None:
    """The groups of `ulysses` x `ring` ranks, and a runtime that says so."""
    ranks = torch.arange(ulysses * ring).view(ring, ulysses)
    made = {True: [dist.new_group(row.tolist()) for row in ranks], False: [dist.new_group(c.tolist()) for c in ranks.T]}
    rank = dist.get_rank()
    usp.PROCESS_GROUP.ULYSSES_PG, usp.PROCESS_GROUP.RING_PG = made[True][rank // ulysses], made[False][rank % ulysses]
    for name, size in (("ulysses", ulysses), ("ring", ring), ("sequence", ulysses * ring)):
        setattr(usp, f"get_{name}_parallel_world_size", lambda size=size: size)
    usp.get_ulysses_parallel_rank = lambda: rank % ulysses
    plain = types.SimpleNamespace(use_spargeattn_head_balance=False)
    backend = usp.AttentionBackendType.SDPA
    state = types.SimpleNamespace(attention_backend=backend, runtime_config=plain, fp8_comms=None, num_pipeline_patch=1)
    state.max_condition_sequence_length = 4  # read, and used by PipeFusion alone
    state.increment_step_counter, state.get_cross_attention_backend = lambda: None, lambda: backend
    alone = types.SimpleNamespace(all_gather=lambda x, dim: x)
    for module in (usp, *(sys.modules[f"{WRAPPERS}_{name}"] for name in MODELS)):
        module.get_runtime_state = lambda: state  # type: ignore[attr-defined]
    for module in (sys.modules[f"{WRAPPERS}_{name}"] for name in MODELS):
        more = dict(get_sequence_parallel_world_size=ulysses * ring, get_sequence_parallel_rank=rank)
        more |= dict(get_classifier_free_guidance_world_size=1, get_classifier_free_guidance_rank=0)
        more |= dict(get_sp_group=types.SimpleNamespace(all_gather=gathered), get_cfg_group=alone)
        for name, said in more.items():
            setattr(module, name, lambda said=said: said)


def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    """What all ranks have, one behind the other."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def models_with_ours(usp: types.ModuleType) -> dict[str, float]:
    """Errors of xDiT's models beside Diffusers' with the same weights; one that did not call ours is infinitely off."""
    found = {}
    for name, (model, given) in {"wan": wan(), "flux": flux()}.items():
        theirs = getattr(sys.modules[f"{WRAPPERS}_{name}"], MODELS[name])(**own_config(model, name))
        theirs.load_state_dict(model.state_dict())
        with mock.patch.multiple(usp, **{n: mock.Mock(wraps=getattr(usp, n)) for n in OURS}), torch.no_grad():
            out = theirs.eval()(**given)[0]
            called = sum(getattr(usp, n).call_count for n in OURS)
        found[name] = error(out, model(**given)[0]) if called else float("inf")
    return found


OURS = ("ring_attn", "_sdpa_all_to_all_single")


def own_config(model: torch.nn.Module, name: str) -> dict[str, Any]:
    """Of a model's configuration what xDiT's class takes."""
    kind = getattr(sys.modules[f"{WRAPPERS}_{name}"], MODELS[name])
    return {n: x for n, x in model.config.items() if n in inspect.signature(kind.__init__).parameters}


def wan() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A Wan of 36 tokens, and a call's inputs, on every rank alike."""
    torch.manual_seed(1)
    sizes = dict(num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2)
    model = diffusers.WanTransformer3DModel(text_dim=12, freq_dim=16, ffn_dim=24, rope_max_seq_len=16, **sizes)
    latents, text = torch.randn(1, 4, 4, 6, 6), torch.randn(1, 5, 12)
    return model.eval(), dict(hidden_states=latents, encoder_hidden_states=text, timestep=torch.tensor([7.0]))


def flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A Flux of 16 tokens and 4 of text, and a call's inputs, on every rank alike."""
    torch.manual_seed(2)
    sizes = dict(num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, num_single_layers=2)
    text = dict(joint_attention_dim=12, pooled_projection_dim=6, axes_dims_rope=(4, 4, 8))
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    given = dict(hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 4, 12), img_ids=places)
    given |= dict(pooled_projections=torch.randn(1, 6), timestep=torch.tensor([0.7]), txt_ids=torch.zeros(4, 3))
    return diffusers.FluxTransformer2DModel(**sizes, **text).eval(), given


def check(rank: int, P: int, checkout: Path | None) -> dict[str, float]:
    """Errors of every split over P ranks, which are all there are."""
    usp, found = imported(checkout), {}
    back = xdit.install()
    try:
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 1, 4, 6 * P, 8)
        joint = torch.randn(3, 1, 4, 3, 8)
        mine = slice(6 * rank, 6 * rank + 6)
        own = [x[:, :, mine] for x in (q, k, v)]
        for ulysses in (n for n in (1, 2, 4) if P % n == 0):
            settle(usp, ulysses, P // ulysses)
            name = f"{P} ranks, Ulysses {ulysses} x ring {P // ulysses}"
            want = F.scaled_dot_product_attention(q, k, v)[:, :, mine]
            found[name] = error(usp.USP(*own), want)
            found |= {f"{name}, {model}": e for model, e in models_with_ours(usp).items()}
            for where in ("front", "rear"):
                more = dict(zip(("joint_query", "joint_key", "joint_value"), joint)) | dict(joint_strategy=where)
                if ulysses > 1:  # xDiT exchanges joint queries with the others, a part of each rank's
                    continue
                keys = [torch.cat([j, x] if where == "front" else [x, j], 2) for j, x in zip(joint[1:], (k, v))]
                wide = [joint[0], own[0]] if where == "front" else [own[0], joint[0]]
                out = usp.USP(*own, **more)
                found[f"{name}, text {where}"] = error(out, F.scaled_dot_product_attention(torch.cat(wide, 2), *keys))
        layers = importlib.import_module("xfuser.core.long_ctx_attention.hybrid.attn_layer")
        layer = layers.xFuserSanaLinearLongContextAttention.__new__(layers.xFuserSanaLinearLongContextAttention)
        torch.nn.Module.__init__(layer)
        parallel = importlib.import_module("xfuser.core.distributed")
        group = types.SimpleNamespace(device_group=dist.group.WORLD)
        with mock.patch.object(parallel, "get_sp_group", return_value=group):
            out = layer.forward(None, *(x.transpose(1, 2) for x in own))
        scores = F.relu(q).double() @ F.relu(k).double().mT
        want = (scores / scores.sum(-1, keepdim=True)) @ v.double()
        found[f"{P} ranks, Sana's layer"] = error(out, want[:, :, mine].transpose(1, 2).flatten(2))
    finally:
        back()
    return found


def main(checkout: Path | None) -> int:
    wrong = 0
    for P in (2, 4):
        ranks = Ranks(P)
        for name, e in ranks.run(P, check, P, checkout, timeout=500)[0].items():
            print(f"{name}: {e:.0e}", flush=True)
            wrong += not e < 1e-5
        ranks.stop()
    return wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else None))
