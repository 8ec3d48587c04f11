"""The training job for Kubernetes, read."""

from __future__ import annotations

import pytest

from tests.support.train_example import ROOT


def job() -> dict:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "launch/kubernetes/pytorchjob.yaml").read_text())
