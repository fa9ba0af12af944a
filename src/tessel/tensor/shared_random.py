"""Random numbers that all workers have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tessel.core.agreement import agree
from tessel.core.partition import Outline, Partition

# The upper bits of seeds that all workers have. A generator keeps its seed, also when a checkpoint
# has restored an earlier state to compute something again.
_SIGN = 0x7E55E1
_BITS = 40


NO_DRAWING = (
    "a converted model draws random numbers from seeds that the host gives it, the same on all "
    "workers; a CUDA graph would repeat those of its capture. Capture the model in eval mode, or "
    "without dropout and its like"
)


def capturing() -> bool:
    """Whether calls are captured in a CUDA graph instead of run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def common_seed(number: int) -> int:
    """A seed for generators of all workers, from a number that all of them have."""
    return _SIGN << _BITS | number % 2**_BITS


def has_common_seed(generator: torch.Generator | None = None) -> bool:
    """Whether a generator was seeded by a common seed, as in converted models.

    Args:
        generator: the generator; None for torch's own.
    """
    return (generator or torch.default_generator).initial_seed() >> _BITS == _SIGN


def seed_generators(seed: int) -> None:
    """Seed torch's generators of the CPU and of the accelerator, as `torch.manual_seed` does.

    For every other kind of device, which might be initialized later, `torch.manual_seed` would also
    store the seed with the stack of the caller, which takes a millisecond of each call of a model.
    """
    torch.default_generator.manual_seed(seed)
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        module = torch.get_device_module(kind)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)  # MPS has one device


@contextmanager
def seeded(seed: int, *devices: torch.device) -> Iterator[None]:
    """Seed torch's generators temporarily; after the block they have their former states.

    Args:
        seed: the seed, equal on all workers that are to draw the same numbers.
        devices: devices besides the CPU whose generators are seeded, too. Others are left alone:
            `torch.manual_seed` would seed them, and nothing would restore them.
    """
    gpus = [each for each in devices if each.type == "cuda"]
    with torch.random.fork_rng(gpus):
        if all(each.type == "cpu" for each in devices):
            torch.default_generator.manual_seed(seed)
        else:
            seed_generators(seed)
        yield


def common_number(
    partition: Partition, generator: torch.Generator | None = None, device: Any = None
) -> int:
    """A random number that all workers have: each draws one, and that of the first worker is used.

    Nothing is sent if generators are known to be in the same state.

    Args:
        partition: the workers.
        generator: the generator that draws it; None for torch's own.
        device: the device of the numbers; torch requires a generator of the same kind of device.
    """
    if generator is not None:
        kind = torch.device("cpu" if device is None else device).type
        if generator.device.type != kind:
            raise RuntimeError(
                f"Expected a '{kind}' device type for generator but found '{generator.device.type}'"
            )

    def draw() -> int:
        there = "cpu" if generator is None else generator.device
        return int(torch.randint(2**62, (), device=there, generator=generator))

    if isinstance(partition, Outline):
        with unset_fake_temporarily():
            return draw()  # to keep generators in step
    if capturing():
        raise NotImplementedError(NO_DRAWING)
    number = draw()
    if has_common_seed(generator) or partition.size == 1 or not partition.active:
        return number
    heard = agree(partition, "a random function of a spread tensor", numbers=[number])
    return heard.numbers[partition.ranks[0]][0]
