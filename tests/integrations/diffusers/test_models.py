"""Transformers of Diffusers on a split sequence: output and all gradients are those of the unmodified model."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("diffusers")

import ring_la
from ring_la.errors import RingLAError
from ring_la.integrations.diffusers import PLANS, parallelize, restore
from ring_la.integrations.diffusers.catalogue import find_plan
from ring_la.integrations.diffusers.compare import tensors_in
from ring_la.integrations.diffusers.guidance import rows_of
from tests.support.attention_cases import error
from tests.support.pool import group
from tests.support.sums import summed

from .linear_models import sana
from .models import CASES, limits, make


def leaves_of(model, inputs) -> dict[str, torch.Tensor]:
    given = {f"{n} {i}": x for n, given in inputs.items() for i, x in enumerate(tensors_in(given)) if x.requires_grad}
    return {n: p for n, p in model.named_parameters() if p.requires_grad} | given


def outcome(model, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output and the gradients of a loss over all of it."""
    leaves = leaves_of(model, inputs)
    given = {n: list(x) if isinstance(x, list) else x for n, x in inputs.items()}  # HunyuanDiT takes residuals off
    out = torch.cat([x.flatten() for x in tensors_in(model(**given))])
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return out.detach(), {n: g for n, g in zip(leaves, grads) if g is not None}


def check_model(rank: int, P: int, name: str, how: dict) -> list[str]:
    cp = ring_la.ContextParallel(group(P), scan="ring", attention=how.get("attention", "ring"), timeout=60)
    model, inputs = make(name)
    if how.get("lora"):
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_out.0", "proj_out"]))
        model.double()
        for n, p in model.named_parameters():
            if "lora_" in n:
                torch.nn.init.normal_(p, std=0.3)
    want, want_grads = outcome(model, inputs)
    parallelize(model, cp, average=how.get("average", False))
    if how.get("checkpoint"):
        model.enable_gradient_checkpointing()
        model.train()
    got, grads = outcome(model, inputs)
    limit, limit_of_gradients = limits(name)
    bad = [] if error(got, want) < limit else [f"output {error(got, want):.1e}"]
    bad += [f"gradient of {n}: one has none" for n in set(grads) ^ set(want_grads)]
    for n, g in summed(dict(sorted(grads.items())), group(P)).items():
        g = g / P if how.get("average") else g
        bad += [] if error(g, want_grads[n]) < limit_of_gradients else [f"{n} {error(g, want_grads[n]):.1e}"]
    return bad


@pytest.mark.parametrize("name", CASES)
def test_every_model_is_that_of_one_process(ranks, name):
    for P in (2, 3):
        bad = ranks.run(P, check_model, P, name, {})
        assert not any(bad), (P, bad)


@pytest.mark.parametrize("P", [1, 2, 4])
def test_any_number_of_ranks_is_one_process(ranks, P):
    for name in ("flux", "hunyuan", "sana", "sana video", "sana wm", "hidream", "helios"):
        bad = ranks.run(P, check_model, P, name, {})
        assert not any(bad), (name, bad)


WAYS = [dict(attention="ulysses", average=True), dict(checkpoint=True), dict(lora=True)]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_ulysses_checkpointing_and_adapters_change_nothing(ranks, how):
    for name in ("flux",) if how.get("lora") else ("flux", "qwen, masked", "sana video"):
        bad = ranks.run(2, check_model, 2, name, how)
        assert not any(bad), (name, bad)


def check_layer_bytes(rank: int) -> list[int]:
    """Bytes that a layer of SANA sends, at three resolutions."""
    cp, out = ring_la.ContextParallel(group(3), scan="ring", timeout=60), []
    for rows, columns in ((4, 3), (16, 3), (4, 12)):
        sent = []
        for layers in (1, 2):
            torch.manual_seed(0)
            model, inputs = sana(layers, rows, columns)
            inputs = {n: x.detach().float() for n, x in inputs.items()}
            parallelize(model, cp)
            with torch.no_grad():
                model(**inputs)
                before = cp.comm.bytes_sent
                model(**inputs)
            sent.append(cp.comm.bytes_sent - before)
        out.append(sent[1] - sent[0])
    return out


def test_bytes_of_a_sana_layer(ranks):
    """A state of 8 x 9 for each of 2 heads and 2 batch rows, summed over the ranks, and rows of 16 channels for each
    neighbour: independent of the resolution but for a row's length."""
    state, token = 2 * 2 * 8 * 9 * 4 * 2 * 2 // 3, 2 * 16 * 4
    want = [[state + n * columns * token for columns in (3, 3, 12)] for n in (1, 2, 1)]
    assert ranks.run(3, check_layer_bytes) == want


def check_steps(rank: int) -> list[str]:
    """What reads the step of time alone: one process's output, no layer computed by two ranks, two steps one after the
    other, and layers that go on by themselves with gradients and afterwards."""
    cp, bad = ring_la.ContextParallel(group(2), scan="ring", timeout=60), []
    for name in sorted(n for n in CASES if PLANS[type(make(n)[0]).__name__].steps is not None):
        model, inputs = make(name)
        ran: list[torch.nn.Module] = []
        with torch.no_grad():
            other = inputs | dict(timestep=inputs["timestep"] / 2)
            want = [model(**given).sample for given in (inputs, other)]
            parallelize(model, cp)
            layers = model._ring_la.steps.layers
            with mock.patch.object(torch.nn.Linear, "forward", autospec=True, side_effect=torch.nn.Linear.forward) as f:
                got = [model(**given).sample for given in (inputs, other)]
            ran = [call.args[0] for call in f.call_args_list if any(call.args[0] is x for x in layers)]
        wrong = max(map(error, got, want))
        bad += [] if wrong < limits(name)[0] else [f"{name}: {wrong:.1e}"]
        counts = cp.comm.all_gather(torch.tensor(len(ran))).wait()
        twice = 2 if name == "qwen, edit" else 0  # the text's layers get a half of the rows, and compute by themselves
        want_ran = 2 * (len(layers) + 2 * twice)
        bad += [] if counts.sum() == want_ran and counts.min() > 0 else [f"{name}: {counts} of {len(layers)}"]
        bad += [] if model(**inputs).sample.requires_grad else [f"{name}: no gradient"]
        restore(model)
        bad += [] if all(type(x) is torch.nn.Linear for x in layers) else [f"{name}: not as before"]
    return bad


def test_what_reads_the_step_alone_is_computed_once(ranks):
    assert ranks.run(2, check_steps) == [[], []]


def check_sharded(rank: int) -> list[str]:
    model, inputs = make("flux")
    _, want = outcome(model, inputs)
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60), average=True)
    mesh = DeviceMesh.from_group(group(2), "cpu")
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    out = model(**inputs).sample
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    errors = {n: error(p.grad.full_tensor(), want[n]) for n, p in model.named_parameters() if n in want}
    with torch.no_grad():  # no layer of the step alone is computed for others: its weight is there within its block
        errors["output without gradients"] = error(model(**inputs).sample, out.detach())
    return [f"{n} {e:.1e}" for n, e in errors.items() if e > 1e-8]


def test_sharded_parameters_get_the_whole_gradient(ranks):
    assert ranks.run(2, check_sharded) == [[], []]


# -- refusals ----------------------------------------------------------------------------------------------


class Other(torch.nn.Module):
    """Not of Diffusers."""


def wrong_models(cp) -> dict[str, object]:
    """What `parallelize` refuses, by what its error says."""
    from diffusers import LatteTransformer3DModel
    from diffusers.models.attention_processor import AttnProcessor2_0

    def odd(change) -> torch.nn.Module:
        model, _ = make("flux")
        change(model)
        return model

    sizes = dict(num_layers=1, attention_head_dim=8, num_attention_heads=2, in_channels=4, sample_size=4)
    latte = LatteTransformer3DModel(patch_size=2, caption_channels=8, norm_type="ada_norm_single", **sizes)
    return {
        "expected one of FluxTransformer2DModel": lambda: parallelize(latte, cp),
        "got Other": lambda: parallelize(Other(), cp),
        "pipeline.transformer": lambda: parallelize(object(), cp),
        "cp: ": lambda: parallelize(make("flux")[0], group(2)),
        "average: ": lambda: parallelize(make("flux")[0], cp, average="no"),
        "not parallelized": lambda: parallelize(parallelize(make("flux")[0], cp), cp),
        "transformer_blocks.1.attn with AttnProcessor2_0": lambda: parallelize(
            odd(lambda m: setattr(m.transformer_blocks[1].attn, "processor", AttnProcessor2_0())), cp
        ),
        "single_transformer_blocks.0, a Other": lambda: parallelize(
            odd(lambda m: m.single_transformer_blocks.__setitem__(0, Other())), cp
        ),
    }


def check_refusals(rank: int) -> list[str]:
    cp = ring_la.ContextParallel(group(2), scan="ring", timeout=60)
    bad = []

    def expect(message: str, call) -> None:
        try:
            call()
            bad.append(f"{message}: accepted")
        except RingLAError as e:
            bad.extend([] if message in str(e) else [f"{message}: {e}"])

    for message, call in wrong_models(cp).items():
        expect(message, call)
    model, inputs = make("flux")
    before = dict(model.transformer_blocks[0].attn.__dict__)
    model.single_transformer_blocks.append(Other())
    expect("a Other", lambda: parallelize(model, cp))
    del model.single_transformer_blocks[-1]
    after = model.transformer_blocks[0].attn
    bad += [] if after.processor is before["processor"] and not after._forward_pre_hooks else ["not left as it was"]
    parallelize(model, cp)
    latents = inputs["hidden_states"]
    expect(
        "controlnet_block_samples: expected 15 tokens",
        lambda: model(**inputs, controlnet_block_samples=[latents[:, :9]]),
    )
    expect("joint_attention_kwargs", lambda: model(**inputs, joint_attention_kwargs={"ip_hidden_states": [latents]}))
    expect("which every rank must be given", lambda: model(**inputs | dict(hidden_states=latents + rank)))
    model(**inputs)
    expect("image_rotary_emb", lambda: model(**inputs | dict(img_ids=inputs["img_ids"][:9])))
    short = dict(encoder_hidden_states=inputs["encoder_hidden_states"][:, :1], txt_ids=inputs["txt_ids"][:1])
    expect("encoder_hidden_states: expected at least 2 tokens", lambda: model(**inputs | short))
    expect("a copy made before", lambda: copy.deepcopy(model))
    for name, argument, one in (
        ("cogvideox", "image_rotary_emb", (torch.ones(18, 16) + rank,) * 2),
        ("qwen", "img_shapes", [[(1, 3, 5) if rank else (1, 5, 3)]] * 2),
        ("ltx", "rope_interpolation_scale", (1.0, 1.0, 1.0 + rank)),
    ):
        other, given = make(name)
        parallelize(other, cp)
        expect("which every rank must be given", lambda: other(**given | {argument: one}))  # noqa: B023
    other, given = make("hidream")
    parallelize(other, cp)
    longer = given | dict(encoder_hidden_states_t5=torch.zeros(2, 6, 8, dtype=torch.float64))
    expect("expected 5 tokens of text, as before in this call, got 6", lambda: other(**longer))
    expect("backend: expected None or one of", lambda: parallelize(make("flux")[0], cp, backend="flashy"))
    expect("kv_comm_dtype: expected None or one of", lambda: parallelize(make("flux")[0], cp, kv_comm_dtype="fp8"))
    model.set_attn_processor(type(before["processor"])())
    expect("set afterwards", lambda: model(**inputs))
    return bad


def test_what_is_not_covered_is_refused_by_name(ranks):
    assert ranks.run(2, check_refusals) == [[], []]


def test_plans_are_tested():
    tested = {type(make(name)[0]).__name__ for name in CASES}
    assert tested == set(PLANS)


def rows_apart(name: str) -> float:
    """How far the answers to halves of a model's batch are from the halves of its answer."""
    model, given = make(name)
    plan = find_plan(model)
    x = given[plan.latents]
    batch, listed = len(x), isinstance(x, list)

    def answer(cut):
        cut = {n: list(x) if isinstance(x, list) else x for n, x in cut.items()}  # HunyuanDiT takes residuals off
        with torch.no_grad():
            return tensors_in(model(**cut, return_dict=False))

    whole, found = answer(given), []
    for mine in (slice(0, batch // 2), slice(batch // 2, batch)):
        got = answer({n: rows_of(n, x, batch, mine, listed) for n, x in given.items()})
        want = whole[mine] if listed else [x[mine] for x in whole]
        found += [error(a, b) for a, b in zip(got, want, strict=True)]
    return max(found)


def test_guidance_knows_every_argument_with_rows():
    """Of models with an even batch whose images have one size; ControlNets run whole on both halves."""
    known = [name for name in CASES if "control" not in name and name not in ("wan", "animate", "minimax", "z-image")]
    found = {name: rows_apart(name) for name in known}
    assert all(e < 1e-4 for e in found.values()), found
