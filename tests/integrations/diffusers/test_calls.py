"""What ranks are told about calls: inputs that differ, kernels named elsewhere, layers left out."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("diffusers")

import diffusers

import ring_la
from ring_la.errors import RingLAError
from ring_la.integrations.diffusers import AttentionPlan, BlockPlan, ModelPlan, TokenRows, parallelize, restore
from tests.support.attention_cases import error
from tests.support.pool import group

from .control_models import z_image, z_image_control
from .models import make


def told(call) -> str:
    """What a call is refused with."""
    try:
        call()
        return "accepted"
    except RingLAError as e:
        return str(e)


def check_later_calls(rank: int) -> list[str]:
    """A first call that agrees, then calls of which one rank's inputs are others."""
    model, inputs = make("flux")
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    with torch.no_grad():
        want, bad = model(**inputs).sample, []
        for name in ("hidden_states", "encoder_hidden_states", "guidance"):
            other = inputs | {name: inputs[name] + rank}
            message = told(lambda: model(**other))  # noqa: B023
            bad += [] if "disagree" in message and f"{name} of rank 1" in message else [f"{name}: {message}"]
        higher = inputs | dict(hidden_states=inputs["hidden_states"][:, : 15 - 3 * rank])
        start, message = time.monotonic(), told(lambda: model(**higher))
        took = time.monotonic() - start
        bad += [] if "[2, 15, 4]" in message and "[2, 12, 4]" in message and took < 30 else [f"{took:.0f} s: {message}"]
        bad += [] if torch.equal(model(**inputs).sample, want) else ["afterwards"]
    return bad


def test_later_calls_are_compared(ranks):
    assert ranks.run(2, check_later_calls) == [[], []]


def check_late(rank: int, dtype: torch.dtype) -> list[str]:
    """As on a GPU: nobody waits for the checksums. The output is NaN, and the next call says why."""
    model, inputs = make("flux")
    model = model.to(dtype)
    inputs = {n: x.detach().to(dtype) for n, x in inputs.items()}
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    model._ring_la.comparison.waits = False
    with torch.no_grad():
        want = model(**inputs).sample
        other = model(**inputs | dict(hidden_states=inputs["hidden_states"] + rank)).sample
        message = told(lambda: model(**inputs))
        bad = [] if other.isnan().all() else ["a call whose inputs differ gave numbers"]
        bad += [] if "hidden_states of rank 1" in message else [message]
        return bad + ([] if torch.equal(model(**inputs).sample, want) else ["afterwards"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_checksums_that_are_read_late(ranks, dtype):
    assert ranks.run(2, check_late, dtype) == [[], []]


def check_kernels(rank: int) -> list[str]:
    """What is named to Diffusers is taken, where there is such a kernel here."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    cp, bad = ring_la.ContextParallel(group(2), scan="ring", timeout=60), []
    model, inputs = make("flux")
    inputs = {n: x.detach() for n, x in inputs.items()}
    want = model(**inputs).sample
    parallelize(model, cp)

    def taken() -> str:
        bad.extend([] if error(model(**inputs).sample, want) < 1e-9 else ["another output"])
        return str(model._ring_la.call.how["backend"])

    with diffusers.attention_backend("_native_math"):
        bad += [] if taken() == "torch" else ["not the context's kernel"]
    model.set_attention_backend("_native_math")
    bad += [] if taken() == "torch" else ["not the model's kernel"]
    model.set_attention_backend("flex")
    message = told(lambda: model(**inputs))
    bad += [] if "flex of transformer_blocks.0.attn" in message and "parallelize(backend=" in message else [message]
    model.reset_attention_backend()  # of the model; everywhere it is still named, as DIFFUSERS_ATTN_BACKEND does
    message = told(lambda: parallelize(make("flux")[0], cp))
    bad += [] if "got flex of the library" in message and "DIFFUSERS_ATTN_BACKEND" in message else [message]
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    bad += [] if taken() == "None" else ["not as before"]
    with torch.no_grad():
        low = parallelize(make("flux")[0], cp, kv_comm_dtype=torch.float8_e4m3fn)(**inputs).sample
        e = error(low, want)
        bad += [] if 1e-6 < e < 0.1 else [f"FP8 on the wire: {e:.1e}"]
        other = parallelize(make("flux")[0], cp, backend="sage")
        message = told(lambda: other(**inputs))
    return bad + ([] if "'sage'" in message and "not on a CUDA device" in message else [message])


def test_kernels_named_to_the_library_and_fp8_on_the_wire(ranks):
    assert ranks.run(2, check_kernels) == [[], []]


def check_skipped(rank: int) -> list[float]:
    errors = []
    for skipped in ([0], [1], [0, 1]):
        model, inputs = make("sd3")
        want = model(**inputs, skip_layers=skipped).sample
        parallelize(model, ring_la.ContextParallel(group(3), scan="ring", timeout=60))
        errors.append(error(model(**inputs, skip_layers=skipped).sample, want))
    return errors


def test_skipped_layers(ranks):
    """SD3's guidance by skipped layers (the first one too, where tokens were split)."""
    assert all(e < 1e-9 for errors in ranks.run(3, check_skipped) for e in errors)


def check_adapters(rank: int) -> list[str]:
    """LoRA's layers that come and go after parallelize, in place of layers that are hooked."""
    from peft import LoraConfig

    model, inputs = make("fibo")
    plain, bad = model(**inputs).sample, []
    names = ["proj_out", "context_embedder", "caption_projection.0.linear", "to_q"]

    def adapted() -> torch.Tensor:
        model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=names))
        torch.manual_seed(1)
        for name, parameter in model.double().named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model(**inputs).sample

    want = adapted()
    parallelize(model, ring_la.ContextParallel(group(2), scan="ring", timeout=60))
    for step, expected in (("gone", plain), ("back", want), ("gone again", plain)):
        model.unload_lora() if step != "back" else adapted()
        e = error(model(**inputs).sample, expected)
        bad += [] if e < 1e-9 else [f"{step}: {e:.1e}"]
    restore(model)
    e = error(model(**inputs).sample, plain)
    return bad + ([] if e < 1e-9 else [f"restored: {e:.1e}"])


def test_adapters_that_come_and_go(ranks):
    assert ranks.run(2, check_adapters) == [[], []]


def check_offloaded(rank: int) -> list[str]:
    """Accelerate's offloading of a whole model, and of its layers one by one."""
    from accelerate import cpu_offload, cpu_offload_with_hook

    cp = ring_la.ContextParallel(group(2), scan="ring", timeout=60)
    model, inputs = make("flux")
    want = model(**inputs).sample
    parallelize(model, cp)
    cpu_offload_with_hook(model, "cpu")
    bad = [] if error(model(**inputs).sample, want) < 1e-9 else ["whole"]
    layers = make("flux")[0]
    parallelize(layers, cp)
    cpu_offload(layers, torch.device("cpu"))
    message = told(lambda: layers(**inputs))
    words = "expected weights that stay on a device", "offloading of time_text_embed"
    return bad + ([] if all(word in message for word in words) else [message])


def test_offloading(ranks):
    assert ranks.run(2, check_offloaded) == [[], []]


# -- a plan of one's own -----------------------------------------------------------------------------------


class OwnProcessor:
    def __call__(self, attn: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in attn.qkv(x).chunk(3, 2))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OwnAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.processor = torch.nn.Linear(8, 24), OwnProcessor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(self, x)


class OwnBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = OwnAttention()

    def forward(self, hidden_states: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.attn(hidden_states + shift)


class Own(torch.nn.Module):
    """A user's transformer, with a layer behind the gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.behind = torch.nn.ModuleList([OwnBlock(), OwnBlock()]), torch.nn.Linear(8, 8)

    def forward(own, hidden_states: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        for block in own.blocks:
            hidden_states = block(hidden_states, shift)
        return own.behind(hidden_states)


def check_own(rank: int, average: bool) -> list[float]:
    torch.manual_seed(0)
    model, x, shift = Own().double(), torch.randn(2, 7, 8).double(), torch.randn(2, 1, 8).double()
    leaves = list(model.parameters())

    def outcome() -> list[torch.Tensor]:
        out = model(x, shift=shift)
        return [out, *torch.autograd.grad((out * out).sum(), leaves)]

    want = outcome()
    rows = TokenRows(("image",))
    block = BlockPlan({"hidden_states": rows, "shift": None}, {"attn": AttentionPlan(("image",), ("OwnProcessor",))})
    plan = ModelPlan({"blocks": "OwnBlock"}, {"OwnBlock": block}, ("hidden_states", "shift"), last="blocks")
    cp = ring_la.ContextParallel(group(3), scan="ring", timeout=60)
    parallelize(model, cp, average=average, plan=dataclasses.replace(plan, layers_behind=True))
    got = outcome()
    for grad in got[1:]:
        dist.all_reduce(grad, group=group(3))
    return [error(g / (3 if average and n else 1), w) for n, (g, w) in enumerate(zip(got, want))]


@pytest.mark.parametrize("average", [False, True])
def test_a_plan_of_ones_own(ranks, average):
    assert all(e < 1e-12 for errors in ranks.run(3, check_own, average) for e in errors)


def check_shared_refiners(rank: int) -> list[str]:
    """A ControlNet that calls the transformer's own refiners, with images of two sizes: it whole, and split as well."""
    torch.manual_seed(0)
    net, inputs = z_image_control()
    model, _ = z_image(2)
    net.from_transformer(net, model)
    for parameter in (*net.double().parameters(), *model.double().parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    context, cp = inputs.pop("control_context"), ring_la.ContextParallel(group(2), scan="ring", timeout=60)

    def images() -> torch.Tensor:
        out = []
        for rows in (6, 4):
            given = inputs | dict(x=[x[:, :, :rows] for x in inputs["x"]])
            residuals = net(**given, control_context=[x[:, :, :rows] for x in context])
            del given["conditioning_scale"]
            out += [x.flatten() for x in model(**given, controlnet_block_samples=residuals).sample]
        return torch.cat(out)

    with torch.no_grad():
        want, errors = images(), []
        for each in (model, net):
            parallelize(each, cp)
            errors.append(error(images(), want))
    return [f"{e:.1e}" for e in errors if e > 1e-9]


def test_a_controlnet_may_share_refiners(ranks):
    assert ranks.run(2, check_shared_refiners) == [[], []]
