"""Train the U-Net of `accelerate_unet.py` with a Trainer of Lightning.

The strategy "ddp" wraps the model by `DistributedDataParallel` over all workers, whose mean of the
gradients is the mean over the copies of the model. Lightning must not assign samples to workers
(`use_distributed_sampler=False`): the workers of one copy take the same batch, and each has some
rows of its images. The losses are those of one process.

    pip install lightning
    python examples/lightning_unet.py
    tessel run -n 4 examples/lightning_unet.py --replicas 2
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import tessel
from tessel.examples.accelerate_unet import UNet, images, main, own_part, replicas


def train(number: int, batch: int, epochs: int) -> list[float]:
    """Train, and return the losses of all steps, each of which takes `batch` images in all."""
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    P = tessel.world()  # first, since Lightning uses an existing process group
    torch.manual_seed(0)
    rows = replicas(number)
    place = next(k for k, each in enumerate(rows) if each.active)
    losses: list[float] = []

    class Segmenter(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = tessel.nn.distribute_module(UNet().double(), rows[place])
            self.criterion = tessel.nn.DistributedCrossEntropyLoss(rows[place])

        def training_step(self, given: Any, _: int) -> Tensor:
            x, labels = given
            part, target = own_part(x, labels, rows[place])
            loss: Tensor = self.criterion(self.net(part), target)
            of_all: Any = self.all_gather(loss.detach())
            losses.append(float(of_all.mean()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    data = images()
    sampler: Any = DistributedSampler(data, number, place, shuffle=False)  # by copy, not worker
    settings: dict[str, Any] = {}
    if P.size > 1:  # torchrun's variables, which Tessel sets under every launcher
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        settings = {"strategy": "ddp", "plugins": [TorchElasticEnvironment()]}
        settings |= {"devices": here, "num_nodes": P.size // here}
    trainer = lightning.Trainer(
        **{"devices": 1, **settings},
        accelerator="cpu",
        use_distributed_sampler=False,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Segmenter(), DataLoader(data, batch // number, sampler=sampler))
    if P.rank == 0:
        print(f"{P.size} worker{'s' if P.size > 1 else ''}, copies of the model: {number}")
    return losses


if __name__ == "__main__":
    main(train)
