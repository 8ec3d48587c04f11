"""What a GPU is, asked once for each: its generation, its multiprocessors and their shared memory.

Everything asks by `gpu.`, so that a test has one place where it puts another GPU's answers.
"""

from __future__ import annotations

import functools

import torch

INTERPRETED = 4
"""Programs that are taken to run at a time where kernels are interpreted."""


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability."""
    return torch.cuda.get_device_capability(device)


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA's Hopper generation, which some kernels are written for."""
    return _of_nvidia(device) and capability(device) == (9, 0)


def from_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of that generation or of a later one."""
    return _of_nvidia(device) and capability(device) >= (9, 0)


def copies_tiles(device: torch.device) -> bool:
    """Whether there is an engine that copies the tiles which descriptors describe; interpreted kernels need none."""
    return device.type != "cuda" or from_hopper(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many it has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def _of_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None
