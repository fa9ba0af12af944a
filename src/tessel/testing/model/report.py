"""What a check of a model found, as figures and as a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tessel.encoding import encodable
from tessel.tensor.gathering import Gather
from tessel.testing.model.difference import Difference

# relative to the largest value of a tensor: rounding of a deep model, and far less than any mistake
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
    torch.complex128: 1e-9,
    torch.complex64: 1e-4,
    torch.complex32: 2e-2,
}
MOST = 5  # modules that are named as the first ones that differ


@encodable
@dataclass(frozen=True)
class ModuleUse:
    """What a module did in the converted model, on the worker that did most.

    Attributes:
        output: by how much its output differs from that of one process.
        kind: its class.
        bytes_sent: in its forward passes, with those of the modules in it.
        bytes_kept: of its outputs and what it keeps for the backward pass.
        bytes_stored: of its parameters and buffers.
    """

    output: Difference
    kind: str
    bytes_sent: int = 0
    bytes_kept: int = 0
    bytes_stored: int = 0

    @property
    def name(self) -> str:
        """Its name in the model; the model itself has none."""
        return self.output.name

    @classmethod
    def merged(cls, output: Difference, uses: Sequence[ModuleUse]) -> ModuleUse:
        """One for several workers: of each figure the largest."""
        return cls(
            output,
            uses[0].kind,
            max(each.bytes_sent for each in uses),
            max(each.bytes_kept for each in uses),
            max(each.bytes_stored for each in uses),
        )


@dataclass(frozen=True)
class ModelReport:
    """What `check_model` found; `print` shows it as tables, the same on all workers.

    Attributes:
        model: the class of the model.
        where: the partition or layout.
        values: the differences of outputs, the loss, gradients and buffers.
        modules: what each module did, in the order in which they ended.
        gathers: the functions that gathered their operands.
        bytes_forward: sent in a forward pass, by the worker that sends most.
        bytes_backward: the same in the backward pass.
        peak: bytes of tensors that were alive at once, on the worker with most.
        peak_alone: the same in one process.
        remarks: what else is to be said.
        attention: the way of each call of attention in a forward pass, as "ring".

    >>> import tessel, torch
    >>> report = tessel.testing.check_model(
    ...     torch.nn.Linear(3, 2), torch.ones(4, 3),
    ...     where=tessel.world().create_cartesian_topology_partition([1, 1]),
    ... )
    >>> report.passed, [each.name for each in report.modules]
    (True, [''])
    """

    model: str
    where: str
    values: tuple[Difference, ...]
    modules: tuple[ModuleUse, ...] = ()
    gathers: tuple[Gather, ...] = ()
    bytes_forward: int = 0
    bytes_backward: int = 0
    peak: int = 0
    peak_alone: int = 0
    remarks: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything is as in one process."""
        return not any(each.differs for each in self.values) and not self.differing

    @property
    def differing(self) -> tuple[ModuleUse, ...]:
        """The modules whose outputs differ; the first is where to look."""
        return tuple(each for each in self.modules if each.output.differs)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        wrong = [each for each in self.values if each.differs]
        head = f"check_model: {self.model} over {self.where}"
        if self.passed:
            yield f"{head} does what it does in one process, in {len(self.values)} values"
        else:
            values, modules = len(self.values), len(self.modules)
            yield (
                f"{head}: {len(wrong)} of {values} values and the outputs of "
                f"{len(self.differing)} of {modules} modules differ from one process"
            )
        if self.differing:
            yield "\nThe first modules whose outputs differ, in the order of execution:"
            first = [(_named(each), each.kind, *_figures(each.output)) for each in self.differing]
            yield from _table(("module", "class", "error", "allowed", ""), first[:MOST])
        elif wrong and self.modules:
            yield (
                "\nThe outputs of all modules are correct: the difference comes from the backward "
                "pass, or from functions that are called outside modules."
            )
        yield ""
        # what differs first: it is what a reader looks for
        rows = [
            (each.name, *_figures(each))
            for each in sorted(self.values, key=lambda each: not each.differs)
        ]
        yield from _table(("value", "error", "allowed", ""), rows)
        if self.modules:
            yield ""
            header = ("module", "class", "error", "sent", "kept", "stored", "")
            uses = []
            for each in self.modules:
                sizes = map(_bytes, (each.bytes_sent, each.bytes_kept, each.bytes_stored))
                error, _, remark = _figures(each.output)
                uses.append((_named(each), each.kind, error, *sizes, remark))
            yield from _table(header, uses)
        if self.gathers:
            yield "\nFunctions without a rule, which gather their operands:"
            places = [(f"`{g.name}`", _bytes(g.num_bytes), str(g.place)) for g in self.gathers]
            yield from _table(("function", "gathered", "place"), places)
        yield ""
        yield (
            f"A worker sends {_bytes(self.bytes_forward)} forward and {_bytes(self.bytes_backward)}"
            f" backward. Tensors created in a step take at most {_bytes(self.peak)}; in one "
            f"process, {_bytes(self.peak_alone)}."
        )
        if self.attention:
            counts = [f"{way} ({n})" for way, n in Counter(self.attention).items()]
            yield f"Ways of attention, and in how many calls: {', '.join(counts)}."
        yield from self.remarks


def _named(module: ModuleUse) -> str:
    return module.name or "(the model)"


def _figures(each: Difference) -> tuple[str, str, str]:
    """Error, what is allowed, and a remark."""
    remark = each.note or ("←" if each.differs else "")
    return _figure(each.error), _figure(each.allowed), remark


def _figure(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.1e}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as what is in them."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    for line in lines:
        yield "  " + "  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip()
