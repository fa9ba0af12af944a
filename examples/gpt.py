"""A small GPT, with its weights in shards on all workers, that learns to write sentences.

The text is generated here, or read from a file. The attention heads, the inner features of the
perceptrons and the characters of embedding, head and loss are split over the workers; each block
needs two all-reduces forward and two backward. The loss is the same on any number of workers.

    python examples/gpt.py
    tessel run -n 4 examples/gpt.py --steps 100 --output loss.png
    torchrun --nproc-per-node 2 examples/gpt.py --text README.md --steps 1000
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from torch import Tensor, nn

import tessel
from tessel import viz
from tessel.nn import ParallelCrossEntropyLoss, ParallelEmbedding, ParallelLinear


@dataclass(frozen=True)
class Settings:
    """The settings of the model and its training."""

    dim: int = 64
    heads: int = 4
    blocks: int = 2
    length: int = 64  # characters that the model sees at once
    batch: int = 16
    steps: int = 300
    rate: float = 3e-3
    seed: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Curve:
    """The result of training on one worker: the loss of each step, and text by the model."""

    workers: int
    losses: list[float]
    written: str
    num_parameters: tuple[int, int]  # of the whole model, and on this worker
    seconds: float


# -- text -----------------------------------------------------------------------------------------

_ADJECTIVES = ("old", "small", "red", "quiet", "hungry")
_NOUNS = ("cat", "dog", "bird", "horse", "farmer")
_VERBS = ("see", "follow", "like", "hear", "call")
_COUNTS = ("two", "three", "many")


def make_text(num_sentences: int, seed: int) -> str:
    """Sentences of a small grammar, in which subject and verb agree."""
    choose = random.Random(seed).choice

    def noun_phrase() -> tuple[str, bool]:
        is_one = choose((True, False))
        words = [choose(("the", "a") if is_one else ("the", *_COUNTS))]
        words += [choose(_ADJECTIVES)] if choose((True, False)) else []
        return " ".join([*words, choose(_NOUNS) + ("" if is_one else "s")]), is_one

    def sentence() -> str:
        (subject, is_one), (what, _) = noun_phrase(), noun_phrase()
        return f"{subject} {choose(_VERBS)}{'s' if is_one else ''} {what}.\n"

    return "".join(sentence() for _ in range(num_sentences))


# -- model ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention; each worker has some of the heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.size = dim // heads
        # outputs in the order (head, q or k or v, feature): a shard consists of whole heads
        self.qkv = ParallelLinear(dim, 3 * dim, bias=False, dim=-1)
        self.out = ParallelLinear(dim, dim, dim=0)

    def forward(self, x: Tensor) -> Tensor:  # (batch, place, feature)
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.size))  # (batch, place, head, 3, feature)
        q, k, v = qkv.transpose(1, 2).unbind(3)  # (batch, head, place, feature)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron, whose inner features are split."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(dim), Attention(dim, heads))
        self.think = nn.Sequential(
            nn.LayerNorm(dim),
            ParallelLinear(dim, 4 * dim, dim=-1),
            nn.GELU(),
            ParallelLinear(4 * dim, dim, dim=0),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class GPT(nn.Module):
    """Maps characters to logits of the next one, for a shard of the characters on each worker."""

    def __init__(self, num_tokens: int, settings: Settings) -> None:
        super().__init__()
        dim, heads, workers = settings.dim, settings.heads, tessel.distributed.get_group_size()
        if dim % heads or heads % workers:
            raise ValueError(
                f"heads must divide dim and be a multiple of the number of workers, got dim {dim} "
                f"and {heads} heads on {workers} workers"
            )
        self.tokens = ParallelEmbedding(num_tokens, dim, dim=0)
        self.places = nn.Embedding(settings.length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(settings.blocks)))
        self.norm = nn.LayerNorm(dim)
        self.head = ParallelLinear(dim, num_tokens, bias=False, dim=-1)
        self.head.weight = self.tokens.weight  # tied: both are split along the characters
        tessel.nn.init.shard_init_helper_(nn.init.normal_, self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, place)
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# -- training -------------------------------------------------------------------------------------


def train(settings: Settings, text: str, is_shown: bool = False) -> Curve:
    """Train a model on all workers of the job, and let it write some text."""
    begin = time.perf_counter()
    letters = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(letters)}
    ids = torch.tensor([numbers[letter] for letter in text])
    torch.manual_seed(settings.seed)
    model = GPT(len(letters), settings).to(settings.dtype)
    measure = ParallelCrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), settings.rate)
    draw = torch.Generator().manual_seed(settings.seed)  # the same batches on all workers

    losses = []
    for step in range(settings.steps):
        starts = torch.randint(len(ids) - settings.length, (settings.batch, 1), generator=draw)
        given = ids[starts + torch.arange(settings.length + 1)]
        optimizer.zero_grad()
        logits = model(given[:, :-1])
        loss = measure(logits.flatten(0, 1), given[:, 1:].flatten())
        loss.backward()
        tessel.nn.clip_grad_norm_(model.parameters(), 1.0)  # the norm of the whole model
        optimizer.step()
        losses.append(loss.item())
        if is_shown and step in shown_steps(settings.steps):
            show(step, losses)

    new = write(model, ids[: settings.length].tolist(), settings.seed)
    written = "".join(letters[number] for number in new)
    return Curve(tessel.world().size, losses, written, sizes(model), time.perf_counter() - begin)


@torch.no_grad()
def write(model: GPT, begin: list[int], seed: int, count: int = 160) -> list[int]:
    """Continue a text, character by character, in the same way on every worker."""
    draw = torch.Generator().manual_seed(seed)
    ids = list(begin)
    for _ in range(count):
        logits = model(torch.tensor([ids[-len(begin) :]]))
        whole = tessel.distributed.gather(logits)  # for all characters, on every worker
        chances = (2 * whole[0, -1]).softmax(0)  # prefers likely characters
        ids.append(int(torch.multinomial(chances, 1, generator=draw)))
    return ids[len(begin) :]


def sizes(model: nn.Module) -> tuple[int, int]:
    """The number of parameters of the whole model, and of this worker."""
    mine = sum(each.numel() for each in model.parameters())
    shards = sum(
        each.numel()
        for each in model.parameters()
        if tessel.distributed.get_parallel_dim(each) is not None
    )
    total = tessel.distributed.reduce(torch.tensor(float(shards), dtype=torch.float64))
    return mine - shards + int(total), mine


# -- the script -----------------------------------------------------------------------------------

console = Console(highlight=False)


def shown_steps(steps: int) -> list[int]:
    """Some twenty steps, including the first and the last."""
    return sorted({round(k * (steps - 1) / 20) for k in range(21)})


def show(step: int, losses: list[float]) -> None:
    if tessel.world().rank == 0:
        bar = "━" * round(40 * losses[-1] / max(losses))
        console.print(f"step {step:4d}  loss {losses[-1]:7.4f}  {bar}")


def draw(curve: Curve, path: Path) -> None:
    """Save a picture of the loss, and the text of the model."""
    figure = viz.new_figure(10, 3.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.15})
    left.plot(curve.losses, color=viz.colour(0))
    left.set(xlabel="step", ylabel="loss", title="the same on any number of workers")
    left.spines[["top", "right"]].set_visible(False)
    right.set_title("it writes")
    right.text(0, 0.95, curve.written, va="top", family="monospace", transform=right.transAxes)
    right.set_axis_off()
    figure.savefig(path, dpi=100, bbox_inches="tight")


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT whose weights are split.")
    parser.add_argument("--text", type=Path, help="a file to learn from; else a text is made")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--dim", type=int, default=Settings.dim, help="features of a character")
    parser.add_argument("--heads", type=int, default=Settings.heads)
    parser.add_argument("--blocks", type=int, default=Settings.blocks)
    parser.add_argument("--length", type=int, default=Settings.length, help="of what it sees")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--output", type=Path, help="where to save a picture")
    return parser.parse_args()


def main() -> None:
    asked = vars(arguments())
    path, output = asked.pop("text"), asked.pop("output")
    torch.set_num_threads(asked.pop("threads"))  # one by default, since tensors are small
    settings = Settings(**asked)
    text = make_text(2000, settings.seed) if path is None else path.read_text()
    curve = train(settings, text, is_shown=True)
    if tessel.world().rank == 0:
        whole, mine = curve.num_parameters
        workers = f"{curve.workers} worker{'s' if curve.workers > 1 else ''}"
        console.print(f"{workers}, {whole} parameters, {mine} here, {curve.seconds:.0f} s")
        console.print(f"it writes:\n{curve.written}", markup=False)
        if output is not None:
            draw(curve, output)


if __name__ == "__main__":
    main()
