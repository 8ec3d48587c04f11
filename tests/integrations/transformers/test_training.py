"""Parallelized models under the library's Trainer, PEFT, FSDP2 and torch.compile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.transformers_models import CASES, VOCABULARY, an_ulp_off

from .test_calls import close, gradients, ids, parallel

LENGTH, STEPS = 22, 2


class Data(torch.utils.data.Dataset):
    """Rows of random tokens; some labels are ignored."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x.where(x % 5 != i % 5, -100)}


def train(rank: int, distributed: bool) -> dict[str, torch.Tensor]:
    """Two steps on rows the Trainer drew, then the loss of five: by 2 data × 2 context ranks, or by one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Trainer, TrainingArguments

    import ring_la
    from ring_la.integrations.transformers import ContextTrainer, parallelize

    model = CASES["qwen3_next"].make()
    kind, replicas = (ContextTrainer, 2) if distributed else (Trainer, 1)
    if distributed:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        parallelize(model, ring_la.ContextParallel(mesh["context"], scan="ring", attention="ring"), average=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=4 // replicas,
            per_device_eval_batch_size=1,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=1e-3,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        rows = [
            row | {"labels": row["input_ids"]} for row in map(Data().__getitem__, range(5))
        ]  # two groups fill up their last batch
        trainer = kind(model=model, args=arguments, train_dataset=Data(), eval_dataset=rows)
        result, evaluated = trainer.train(), trainer.evaluate()
    assert trainer.get_total_train_batch_size(arguments) == 4
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return weights | {"loss": torch.tensor(result.training_loss), "eval_loss": torch.tensor(evaluated["eval_loss"])}


@contextmanager
def accelerate_of_its_own() -> Iterator[None]:
    """What Accelerate keeps for the process, and the environment, are as before afterwards."""
    from accelerate.state import AcceleratorState, PartialState

    before = dict(os.environ)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def train_distributed(rank: int) -> dict[str, torch.Tensor]:
    with accelerate_of_its_own():
        return train(rank, True)


def test_trainer_over_data_and_context(ranks):
    pytest.importorskip("accelerate")
    expected = train(0, False)
    start = dict(CASES["qwen3_next"].make().named_parameters())
    results, loss = ranks.run(4, train_distributed), expected.pop("loss")
    close(sum(result["loss"] for result in results) / 4, loss)
    evaluated = expected.pop("eval_loss")
    for result in results:
        close(result["eval_loss"], evaluated)
    for n, x in expected.items():
        update = (x - start[n]).detach()
        for result in results:
            error = (result[n] - x).abs().max()
            assert error <= 1e-3 * update.abs().max() + 1e-6, f"{n}: {error:.1e} of {update.abs().max():.1e}"
    assert max(float((x - start[n]).detach().abs().max()) for n, x in expected.items()) > 1e-3


def refused_by_the_trainer(rank: int, folder: str) -> None:
    """Models that are not ready, options that want whole logits or rows of their own, groups that do not fit."""
    from transformers import TrainingArguments

    import ring_la
    from ring_la.errors import ArgumentError, UnsupportedError
    from ring_la.integrations.transformers import ContextTrainer, parallelize

    def start(model, loss, options: dict) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[], **options)
        trainer = ContextTrainer(model=model, args=arguments, eval_dataset=Data(), compute_loss_func=loss)
        trainer.predict(Data()) if loss is None else trainer.evaluate()

    def check(model, error: type, message: str, loss=None, **options) -> None:
        with accelerate_of_its_own(), pytest.raises(error, match=message):
            start(model, loss, options)

    check(CASES["llama"].make(), ArgumentError, "model: expected one that parallelize")
    check(parallel("llama", check=False)[0], ArgumentError, "model: expected one parallelized with average=True")
    ready, _ = parallel("llama", average=True, check=False)
    check(ready, UnsupportedError, "label_smoothing_factor: expected 0", label_smoothing_factor=0.1)
    check(ready, UnsupportedError, "split_batches: expected False", accelerator_config={"split_batches": True})
    check(ready, UnsupportedError, "prediction_loss_only: expected True")
    check(ready, UnsupportedError, "compute_loss_func: expected None", loss=lambda *_, **__: None)
    uneven, _ = torch.distributed.new_subgroups_by_enumeration([[0, 1, 2], [3]])
    model = parallelize(CASES["llama"].make(), ring_la.ContextParallel(uneven, scan="ring"), average=True, check=False)
    check(model, ArgumentError, r"model: expected context groups of one size .*, got \(0, 1, 2\) and \(3,\)")


def test_the_trainer_says_what_it_cannot_do(ranks, tmp_path):
    pytest.importorskip("accelerate")
    ranks.run(4, refused_by_the_trainer, str(tmp_path))


def lora(rank: int, targets: list[str], saved: list[str]) -> None:
    """Adapters put on a parallelized model, and on one that is parallelized afterwards."""
    from peft import LoraConfig, get_peft_model

    from ring_la.integrations.transformers import parallelize

    x = ids(2)
    model, cp = parallel("qwen3_next")
    config = LoraConfig(r=2, target_modules=targets, modules_to_save=saved, init_lora_weights=False)

    def adapted(base):
        torch.manual_seed(1)
        return get_peft_model(base, config)

    def of_one(base):
        alone = adapted(base)
        want = alone(input_ids=x, labels=x, use_cache=False)
        want.loss.backward()
        return want, gradients(alone)

    want, expected = of_one(CASES["qwen3_next"].make())
    rounded = [of_one(an_ulp_off(CASES["qwen3_next"].make(), n))[1] for n in range(4)]
    after = adapted(CASES["qwen3_next"].make())
    parallelize(after.get_base_model(), cp)
    for split in (adapted(model), after):
        got = split(input_ids=x, labels=x)
        got.loss.backward()
        close(got.loss, want.loss)
        for n, g in gradients(split, cp).items():  # within twice what an ulp of the weights moves
            moved = 2 * max(float((r[n] - expected[n]).abs().max()) for r in rounded)
            close(g, expected[n], atol=max(2e-5, moved), msg=lambda m, n=n: f"{n}: {m}")
    assert any("lora" in n and bool(g.any()) for n, g in expected.items())


@pytest.mark.parametrize(
    ("targets", "saved"), [(["q_proj", "in_proj_qkvz", "out_proj"], ["lm_head"]), (["embed_tokens"], ["linear_attn"])]
)
def test_lora_trains_as_on_one_process(ranks, targets, saved):
    pytest.importorskip("peft")
    ranks.run(2, lora, targets, saved)


def lora_by_places(rank: int) -> None:
    """An adapter that counts tokens from the end of a row, added when the model has been called, is refused."""
    from peft import LoraConfig, get_peft_model

    from ring_la.errors import UnsupportedError

    model, _ = parallel("llama")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted(input_ids=ids(), labels=ids())
    adapted.add_adapter("activated", LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[4, 5]))
    with pytest.raises(UnsupportedError, match="alora_invocation_tokens: expected None"):
        adapted(input_ids=ids(), labels=ids())


def test_lora_that_goes_by_places_is_refused(ranks):
    pytest.importorskip("peft")
    ranks.run(1, lora_by_places)


def compiled_latents(rank: int) -> float:
    """How far the loss of a compiled model with latents, without a break, is from the eager one's."""
    model, _ = parallel("kimi_linear")
    whole = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    want = model(input_ids=ids(2), labels=ids(2)).loss
    with torch._dynamo.config.patch(specialize_float=True):
        return float((whole(input_ids=ids(2), labels=ids(2)).loss - want).detach().abs())


def test_a_model_with_latents_compiles_whole(ranks):
    """Its layers ask for keys by a function that was made anew, and read its source, in every call."""
    assert ranks.run(2, compiled_latents) == [0.0, 0.0]


def compiled(rank: int) -> int:
    """The same loss and gradients from a compiled model without a break, over two lengths, and the same loss over 17
    more; returns the graphs. And the same loss from one token on each rank, which has a graph of its own.

    With floats as constants, which PyTorch finds out, too, when it has traced all of it once.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model, cp = parallel("qwen3_next")
    whole = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (LENGTH, LENGTH - 5):
        x = ids(2)[:, :tokens]
        want = model(input_ids=x, labels=x)
        want.loss.backward()
        expected = gradients(model, cp)
        with torch._dynamo.config.patch(specialize_float=True):
            got = whole(input_ids=x, labels=x)
            got.loss.backward()
        close(got.loss, want.loss)
        for n, g in gradients(model, cp).items():
            close(g, expected[n], msg=lambda m, n=n: f"{n}: {m}")
    with torch._dynamo.config.patch(specialize_float=True):
        alone = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        for tokens in (2, *range(LENGTH - 18, LENGTH + 1)):
            x, call = ids(2)[:, :tokens], alone if tokens == 2 else whole
            close(call(input_ids=x, labels=x).loss, model(input_ids=x, labels=x).loss)
    torch._dynamo.reset()
    return counter.frame_count


def test_compiled_models_have_the_same_loss_and_gradients(ranks):
    assert ranks.run(2, compiled) == [1, 1]  # none for any length but the first


def sharded(rank: int) -> None:
    """FSDP2 over the ranks of the context group, which averages gradients; the head is gathered for every chunk."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from ring_la.errors import UnsupportedError
    from tests.support.pool import group

    x = ids(2)
    alone = CASES["qwen3_next"].make()
    want = alone(input_ids=x, labels=x, use_cache=False)
    want.loss.backward()
    expected = gradients(alone)
    model, _ = parallel("qwen3_next", average=True, loss_chunk=20)  # 11 tokens of one rank, 10 of the other
    mesh = DeviceMesh.from_group(group(), "cpu")
    for layer in (*model.model.layers, model.lm_head):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got = model(input_ids=x, labels=x)
    got.loss.backward()
    close(got.loss, want.loss)
    for n, p in model.named_parameters():
        grad = torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
        close(grad, expected[n], msg=lambda m, n=n: f"{n}: {m}")

    sums, _ = parallel("llama")  # its gradients would be halved
    with pytest.raises(UnsupportedError, match="average: expected True under FSDP2, got False"):
        fully_shard(sums, mesh=mesh)(input_ids=x)
    sums, _ = parallel("llama")
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    DistributedDataParallel(sums, process_group=alone)(input_ids=x, labels=x)
    sums, _ = parallel("llama")
    wrapped = DistributedDataParallel(sums, process_group=group())
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="average: expected True under DDP, got False"):
            wrapped(input_ids=x, labels=x)


def test_fsdp_over_the_context_has_the_same_gradients(ranks):
    ranks.run(2, sharded)


def train_alone(rank: int) -> str:
    """The Trainer on ranks of a job that nothing in the environment tells Accelerate of."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import TrainingArguments

    import ring_la
    from ring_la.integrations.transformers import ContextTrainer, parallelize
    from tests.support.pool import group

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    for state in (PartialState, AcceleratorState, GradientState):
        state._reset_state()
    model = parallelize(CASES["qwen3_next"].make(), ring_la.ContextParallel(group(), scan="ring"), average=True)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ring_la.ArgumentError) as error:
        ContextTrainer(model=model, args=TrainingArguments(folder, use_cpu=True, report_to=[]), train_dataset=Data())
    for state in (PartialState, AcceleratorState, GradientState):
        state._reset_state()
    return str(error.value)


def test_ranks_that_accelerate_takes_for_one_are_refused(ranks):
    """It averaged nothing: every rank took steps of its own part of the gradients."""
    expected = "args: expected TrainingArguments of 4 processes, the ranks of the job, got 1. Accelerate goes by RANK"
    for said in ranks.run(4, train_alone):
        assert said.startswith(expected)
