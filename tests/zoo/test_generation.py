"""Text that a converted model writes token by token, with keys and values in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from entries import floating
from tessel.tensor.gathering import noted_gathers
from transformers_entries import groups, model, text

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.zoo


def written(attention: str, padding: str) -> tuple[bool, list[str]]:
    """Whether it is what one process writes, and what was gathered."""
    with floating(torch.float64), torch.no_grad():
        torch.manual_seed(0)
        llama: Any = model("LlamaForCausalLM", attention, **groups)().double().eval()
        given = text(padding, labels=False)()
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        expected = llama.generate(**given, **settings)
        world = tessel.world()
        grid = world.create_cartesian_topology_partition([1, world.size])
        converted: Any = tessel.nn.distribute_module(llama, grid)
        spread = {name: tessel.spread(value, grid) for name, value in given.items()}
        with noted_gathers() as gathers:
            found = converted.generate(**spread, **settings)
        return torch.equal(found.full(), expected), [each.name for each in gathers]


@pytest.mark.limit(210)  # workers import transformers first
@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_writes_what_one_process_writes(
    run: Run, attention: str, padding: str, nprocs: int
) -> None:
    pytest.importorskip("transformers")
    for found in run(written, attention, padding, nprocs=nprocs, timeout=180):
        assert found == (True, [])
