"""Choose the best partition of an operator's tensor for a number of workers.

Nothing runs, and the workers need not exist: partitions are compared by the times that a machine
model predicts, for up to hundreds of thousands of workers. `tessel doctor --measure` measures this
machine for it, or a cluster if a launcher starts it on several hosts; `--machine` names the file of
another model, or one that comes with Tessel (jean-zay). The steps of the best partition are listed
with their costs for a worker. For a model of torch, `--model` compares grids by the work of its
layers and the halos that they exchange in a training step.

operators, on a tensor of the given shape:
  fft          the complex Fourier transform
  rfft         the real Fourier transform
  convolution  transform, a matrix of channels for each frequency, and back
  fno          the same for low frequencies only: a layer of a Fourier neural operator
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

import torch

from tessel.cli import argument, wide_console
from tessel.cli.plan_model import plan_model
from tessel.operators.algebra import ParOperator, kron
from tessel.operators.choose import Choice, best_partition
from tessel.operators.dft import ParDFT
from tessel.operators.matrices import ParIdentity, ParMultilinear
from tessel.operators.rates import known_machine
from tessel.operators.restriction import ParRestriction
from tessel.operators.space import complex_of, real_of

SUMMARY = "choose the best partition of a tensor for an operator and a number of workers"

OPERATORS = ("fft", "rfft", "convolution", "fno")
_DTYPES = ("float32", "float64", "complex64", "complex128")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tessel plan`."""
    parser.add_argument(
        "--shape", type=lengths, required=True, help="lengths in space, such as 256,256,256"
    )
    parser.add_argument("--operator", choices=OPERATORS, default="fft", help="fft by default")
    parser.add_argument("--workers", type=int, required=True, help="number of workers")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="or its precision")
    parser.add_argument(
        "--channels", type=int, help="a dimension before those in space; fno: 20 by default"
    )
    parser.add_argument(
        "--modes", type=lengths, help="fno: kept frequencies of each sign, such as 12 or 12,12,8"
    )
    parser.add_argument("--batch", type=int, default=1, help="columns on each worker (default: 1)")
    parser.add_argument(
        "--anywhere", action="store_true", help="leave the result where the last step ends"
    )
    parser.add_argument(
        "--machine", metavar="FILE", help="machine model, or jean-zay (default: this machine's)"
    )
    parser.add_argument(
        "--partition", type=lengths, help="predict for this partition, such as 64,64,1, alone"
    )
    parser.add_argument(
        "--model",
        metavar="PACKAGE:FUNCTION",
        help="what makes a torch module, as torchvision.models:resnet18; --shape is its input",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the steps (PNG, PDF, SVG)")
    parser.add_argument("--json", action="store_true", help="print the choice as JSON")


def execute(args: argparse.Namespace) -> int:
    """Choose and print; return 2 for invalid arguments."""
    try:
        machine = known_machine(args.machine)
        if args.model is not None:
            return plan_model(args, machine)
        operator = build(
            args.operator, args.shape, getattr(torch, args.dtype), args.channels, args.modes
        )
        begin = time.perf_counter()
        out = "anywhere" if args.anywhere else None
        choice = best_partition(
            operator,
            args.workers,
            partition_out=out,
            columns=args.batch,
            machine=machine,
            partition=args.partition,
        )
        seconds = time.perf_counter() - begin
        if args.json:
            print(json.dumps(as_json(choice), indent=2))
        else:
            wide = wide_console()
            wide.print(
                f"[bold]{choice.workers} workers[/], {operator.domain} → {operator.codomain}: "
                f"{len(choice.candidates)} partitions compared in {seconds:.2f} s"
            )
            wide.print(choice)
            wide.print("\n[bold]the steps of the best partition[/]")
            wide.print(choice.explanation)
        if args.picture:
            choice.explanation.save(args.picture)
    except (ValueError, ImportError, OSError) as error:
        print(f"tessel plan: {error}", file=sys.stderr)
        return 2
    return 0


def build(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    channels: int | None = None,
    modes: tuple[int, ...] | None = None,
) -> ParOperator:
    """An operator by its name, on a tensor of this shape and precision.

    >>> build("fno", (16, 16), torch.float32, 3, (4,)).domain
    float32 3×16×16
    """
    if modes is not None and name != "fno":
        raise ValueError(f"--modes applies to the operator fno, not to {name}")
    # By default 20 channels, and 12 modes along each dimension.
    kept = None
    if name == "fno":
        channels = 20 if channels is None else channels
        kept = (12,) if modes is None else modes
        kept = kept * len(shape) if len(kept) == 1 else kept
        if len(kept) != len(shape):
            raise ValueError(
                f"--modes needs one number, or one for each of {len(shape)} dimensions"
            )
    if name == "convolution" and channels is None:
        channels = 1
    transform = transform_of(name != "fft", shape, dtype, channels, kept)
    if name in ("fft", "rfft"):
        return transform
    assert channels is not None
    spectrum = transform.codomain
    weights = ParMultilinear(spectrum.dtype, channels, channels, spectrum.shape[1:])
    # A restriction has no inverse; the adjoint costs what the inverse on its range would.
    back = transform.H if kept else transform.inv
    return back @ weights @ transform


def transform_of(
    is_real: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    channels: int | None,
    kept: tuple[int, ...] | None,
) -> ParOperator:
    """The Fourier transform in space, real or complex, optionally of low frequencies only."""
    factors: list[ParOperator] = []
    if channels is not None:
        factors.append(ParIdentity(real_of(dtype) if is_real else complex_of(dtype), channels))
    for dim, length in enumerate(shape):
        halves = is_real and dim == len(shape) - 1
        factor: ParOperator = ParDFT(real_of(dtype) if halves else complex_of(dtype), length)
        if kept is not None:
            # Low frequencies of both signs, unless there is only one sign or all are kept.
            all_of_it, low = factor.codomain.numel, kept[dim]
            ranges = [(0, low), (all_of_it - low, all_of_it)]
            if halves or 2 * low >= all_of_it:
                ranges = [(0, min(low, all_of_it) if halves else all_of_it)]
            factor = ParRestriction(complex_of(dtype), all_of_it, ranges) @ factor
        factors.append(factor)
    return kron(*factors)


@argument
def lengths(text: str) -> tuple[int, ...]:
    """Parse whole numbers of at least 1, separated by commas.

    >>> lengths("256,128")
    (256, 128)
    """
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise ValueError(f"expected integers such as 256,128, got {text!r}")
    return numbers


def as_json(choice: Choice) -> dict[str, object]:
    """A choice, with all details, as JSON values."""
    explanation = choice.explanation
    return {
        "workers": choice.workers,
        "machine": choice.machine.origin,
        "candidates": [
            {
                "partition": list(each.partition),
                "time": each.time,
                "memory": each.memory,
                "bytes": each.bytes,
                "transfers": each.plan.num_transfers,
            }
            for each in choice.candidates
        ],
        "steps": [
            {
                "step": line.title,
                "layout": line.layout,
                "workers": {
                    str(worker): {"local_shape": line.after.shape_on(worker), **asdict(cost)}
                    for worker, cost in zip(explanation.workers, costs, strict=True)
                },
            }
            for line, costs in zip(explanation.lines, explanation.costs, strict=True)
        ],
    }
