"""What tests of ``ring-la plan`` share: its options, a cluster, models and settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from ring_la.cli import plan, prediction
from ring_la.cli.cluster import Cluster
from ring_la.cli.rates import H200
from ring_la.cli.workload import Workload
from ring_la.models import HybridConfig
from ring_la.scan.auto import Line

ROOT = Path(__file__).parents[2]
NEAR, FAR = Line(1e-5, 3e11), Line(2e-5, 4.5e10)
CLUSTER = Cluster(8, NEAR, FAR, post=0.0, launch=0.0)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(words)


def config(*layers: str, **more) -> HybridConfig:
    return HybridConfig(vocab_size=64, dim=32, layers=layers, num_heads=2, **more)


def setting(*layers: str, length: int = 4096, **more) -> prediction.Setting:
    return prediction.Setting(Workload.of(config(*layers)), H200, CLUSTER, length, memory=H200.memory, **more)
