"""Peak memory of training with parameters, gradients and Adam's averages whole or split.

A converted model splits activations. What it keeps beside them is whole on each worker (plain),
or the state of the optimizer is split (ZeroRedundancyOptimizer), or parameters, gradients and
state are, and each layer gathers its own while it computes (fully_shard). Counted are the bytes of
tensors that are alive at once, from the making of the model to the end of the second step, and the
bytes that a worker sends in a step by Tessel; what torch's wrappers send is not in it.

    python benchmarks/split_parameters.py [--workers 2 4] [--only TEXT] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tessel
from tessel import Layout
from tessel.testing import count_memory, count_traffic

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "common"))
import models  # (the same models as in the tests)

WAYS = ("plain", "optimizer state split", "all split")
MODELS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "3-D U-Net": ("UNet", (3, 24, 3), (1, 1, 32, 32, 32)),
    "ResNet-18": ("ResNet18", (64, 1000), (2, 3, 128, 128)),
}


def train(name: str, way: str, quick: bool) -> tuple[float, int, int]:
    """The last loss, the peak of this worker's tensors, and what it sent in the last step."""
    warnings.simplefilter("ignore")
    world = tessel.world()
    kind, arguments, shape = MODELS[name]
    if quick:
        arguments = (arguments[0], 4, *arguments[2:]) if kind == "UNet" else (8, 10)
    P_x = world.create_cartesian_topology_partition([1, 1, world.size, *[1] * (len(shape) - 3)])
    layout = Layout.balanced(P_x, shape)
    x = layout.local_part(torch.rand(shape, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(0)
    with count_memory() as memory:
        model: nn.Module = getattr(models, kind)(*arguments)
        if world.size > 1:
            model = tessel.nn.distribute_module(model, P_x)
        if way == "all split":
            from torch.distributed.fsdp import fully_shard

            mesh = world.to_mesh(names=("workers",))
            layers = [each for each in model.modules() if not [*each.children()]]
            for layer in (each for each in layers if [*each.parameters()]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if way == "optimizer state split":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer: Any = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3
            )
        else:
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(2):
            with count_traffic() as traffic:
                y = model(x)
                loss = y.square().sum() if y.dim() == x.dim() else y.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return float(loss.detach()), memory.peak, traffic.bytes_sent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="part of the name of a model")
    parser.add_argument("--quick", action="store_true", help="narrow models")
    options = parser.parse_args()
    print("| model | workers | kept | peak of a worker | sent by Tessel in a step |")
    print("|---|---|---|---|---|")
    for name in (each for each in MODELS if options.only in each):
        for workers in (1, *options.workers):
            for way in WAYS if workers > 1 else WAYS[:1]:
                found = tessel.launch(train, workers, name, way, options.quick, timeout=500)
                peak, sent = (max(each[k] for each in found) / 2**20 for k in (1, 2))
                print(
                    f"| {name} | {workers} | {way} | {peak:.1f} MiB | {sent:.1f} MiB |", flush=True
                )


if __name__ == "__main__":
    main()
