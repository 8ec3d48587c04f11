"""The order in which files are given out to workers, a plugin of pytest: those that take longest first.

Left to itself pytest-xdist gives out files with many tests first, and the suite ends with one worker waiting for the
other's last file of few long ones.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "tests/nn/test_compile.py",
    "tests/conformance/test_sharded.py",
    "tests/examples/test_train_hybrid.py",
    "tests/integrations/diffusers/test_models.py",
    "tests/softmax/test_sharded.py",
    "tests/blockwise/test_models.py",
    "tests/integrations/transformers/test_models.py",
    "tests/kernels/test_triton.py",
    "tests/launch/test_launch.py",
    "tests/nn/test_compile_sharded.py",
    "tests/integrations/diffusers/test_compile.py",
    "tests/distributed/test_agreement.py",
    "tests/inference/test_generate.py",
    "tests/serving/test_engine.py",
    "tests/blockwise/test_at_once.py",
    "tests/kernels/test_hopper_emulated_shards.py",
    "tests/kernels/test_hopper_emulated.py",
    "tests/kernels/test_across_ranks.py",
    "tests/test_docs.py",
    "tests/serving/test_load.py",
    "tests/examples/test_train_transformers.py",
    "tests/examples/test_small_forms.py",
    "tests/serving/test_serve.py",
    "tests/integrations/transformers/test_training.py",
    "tests/distributed/test_compiled_calls.py",
    "tests/softmax/test_triton.py",
    "tests/fuzz/test_fuzz.py",
    "tests/examples/test_trainer_hybrid.py",
    "tests/distributed/test_conv.py",
    "tests/scan/test_border.py",
    "tests/testing/test_kit.py",
    "tests/distributed/test_determinism.py",
    "tests/training/test_mesh.py",
    "tests/serving/test_other_caches.py",
    "tests/serving/test_ahead.py",
    "tests/integrations/transformers/test_trainer_shards.py",
    "tests/integrations/transformers/test_tensor_parallel.py",
)
"""Files of fifteen seconds and more, the longest first; tests/test_lanes.py holds that they are there."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # from pytest-xdist 3.7 on
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        place = {name: i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
