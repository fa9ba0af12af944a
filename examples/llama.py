"""Train a language model on a sequence that does not fit on one worker.

A Llama of Hugging Face's transformers, written without workers in mind, reads a long text of which
each worker has some tokens: `distribute_module(llama, grid)`, then `llama(ids, labels=ids)`. Keys
and values are passed from worker to worker, so that every token sees all tokens before it, and no
worker ever stores the scores of all pairs. The losses are those of one process, which trains as
well for comparison.

Weights are random, or read from a folder that `save_pretrained` wrote.

    pip install transformers
    python examples/llama.py
    tessel run -n 4 examples/llama.py --length 4096 --output losses.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tessel
from tessel import viz
from tessel.examples.gpt import make_text
from tessel.testing import count_memory, count_traffic


@dataclass(frozen=True)
class Settings:
    """The settings of the training and its data.

    Attributes:
        length: the length of the sequence, in tokens.
        steps: the number of training steps; each reads the next stretch of the text.
        width: the number of features of a token.
        layers: the number of layers of the model.
        rate: the learning rate.
        weights: a folder with a model, instead of a random one.
    """

    length: int = 512
    steps: int = 6
    width: int = 64
    layers: int = 2
    rate: float = 1e-3
    weights: Path | None = None


@dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        losses: the loss before each step.
        peak: the peak memory of tensors that a step creates, on each worker, in bytes.
        sent: the bytes that each worker sends in a step.
    """

    losses: list[float]
    peak: list[int]
    sent: list[int]


def language_model(settings: Settings) -> Any:
    """A Llama of transformers, with weights from a folder, or random ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if settings.weights is not None:
        return LlamaForCausalLM.from_pretrained(settings.weights)
    torch.manual_seed(0)  # the same model on all workers
    width = settings.width
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,  # one for each character
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=settings.layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=settings.length,
        )
    )


def stretches(settings: Settings) -> list[Tensor]:
    """A stretch of the text for each step: (1, length) characters, as numbers."""
    # a sentence has more than ten characters
    text = make_text(settings.length * settings.steps // 10 + 1, seed=1)
    numbers = torch.tensor(list(text.encode()), dtype=torch.long)
    return list(numbers[: settings.length * settings.steps].reshape(-1, 1, settings.length))


def train(model: Any, batches: Sequence[Tensor], rate: float) -> tuple[list[float], int, int]:
    """Train in plain torch, with plain or spread tensors: losses, peak memory and bytes sent."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for ids in batches:
        with count_traffic() as traffic, count_memory() as memory:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, memory.peak, traffic.bytes_sent  # of the last step, which is like the others


def train_whole(settings: Settings) -> Trained:
    """Train in one process."""
    losses, peak, sent = train(language_model(settings), stretches(settings), settings.rate)
    return Trained(losses, [peak], [sent])


def train_in_parts(settings: Settings) -> Trained:
    """Train on all workers, each of which has some tokens of the sequence in all layers."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, P.size])  # batch, sequence
    model = tessel.nn.distribute_module(language_model(settings), grid)
    batches = [tessel.spread(ids, grid) for ids in stretches(settings)]
    losses, peak, sent = train(model, batches, settings.rate)
    told = P.group.share_objects((peak, sent))
    peaks, bytes_sent = ([pair[k] for pair in told] for k in range(2))
    return Trained(losses, peaks, bytes_sent)


def draw(whole: Trained, parts: Trained, path: Path) -> None:
    """Save a picture of the losses and the memory of workers."""
    figure = viz.new_figure(10, 3.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.3})
    steps = range(len(whole.losses))
    left.plot(steps, whole.losses, color=viz.colour(0), lw=5, alpha=0.4, label="one process")
    left.plot(steps, parts.losses, color=viz.colour(1), label=f"{len(parts.peak)} workers")
    left.set(xlabel="step", ylabel="loss", title="the losses are those of one process")
    left.legend(frameon=False)
    names = ["one process", *(f"worker {k}" for k in range(len(parts.peak)))]
    colours = [viz.colour(0), *[viz.colour(1)] * len(parts.peak)]
    mebibytes = [each / 2**20 for each in (*whole.peak, *parts.peak)]
    right.barh(names[::-1], mebibytes[::-1], color=colours[::-1])
    right.set(xlabel="MiB", title="memory of the tensors of a step")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=72, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=Settings.length, help="of the sequence")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--width", type=int, default=Settings.width, help="features of a token")
    parser.add_argument("--layers", type=int, default=Settings.layers)
    parser.add_argument("--rate", type=float, default=Settings.rate, help="of learning")
    parser.add_argument("--weights", type=Path, help="a folder that `save_pretrained` wrote")
    parser.add_argument("--output", type=Path, help="where to save a picture")
    options = vars(parser.parse_args())
    output = options.pop("output")
    settings = Settings(**options)

    P = tessel.world()
    parts = train_in_parts(settings)
    if P.rank != 0:
        return
    whole = train_whole(settings)
    print(f"{P.size} worker{'s' if P.size > 1 else ''} read {settings.length} tokens")
    for step, (each, other) in enumerate(zip(parts.losses, whole.losses, strict=True)):
        print(f"step {step}: loss {each:.4f}, in one process {other:.4f}")
    apart = max(abs(a / b - 1) for a, b in zip(parts.losses, whole.losses, strict=True))
    print(f"largest relative error {apart:.6f}")
    print(f"memory: at most {max(parts.peak) / whole.peak[0]:.0%} of that of one process")
    print(f"sent by each worker in a step: {', '.join(map(viz.num_bytes, parts.sent))}")
    if output is not None:
        draw(whole, parts, output)


if __name__ == "__main__":
    main()
