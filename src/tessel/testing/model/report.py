"""The report of a check of a model: differences of values, as numbers and as a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tessel.encoding import encodable
from tessel.operators.units import num_bytes
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.gathering import Gather
from tessel.testing.drawing import plain

T = TypeVar("T")

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
# values far below the largest gradient, or below one, have rounding errors relative to these
FLOOR = 1e-2
_EXACT = (int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@encodable
@dataclass(frozen=True)
class Difference:
    """The difference of a tensor of the converted model from that of one process.

    Attributes:
        name: the name of an output, parameter, input, buffer or module.
        error: the largest difference of two values; infinite if they are of different kinds, NaN if
            one process has nothing to compare with.
        scale: the largest value in one process.
        dtype: the dtype of the tensor, as text.
        note: another difference: a shape, a dtype.
        allowed: the allowed error, due to rounding.
    """

    name: str
    error: float
    scale: float = 0.0
    dtype: str = ""
    note: str = ""
    allowed: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether the error is more than rounding."""
        return bool(self.note) or self.error > self.allowed


def difference(name: str, got: Any, expected: Any) -> Difference:
    """The difference of a worker's value from its part of that of one process."""
    got, expected = _numbers(got), _numbers(expected)
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        if type(got) is type(expected) and not isinstance(got, _EXACT):
            return Difference(f"{name}, a {type(got).__name__}, is not compared", math.nan)
        if type(got) is type(expected) and got == expected:
            return Difference(name, 0.0)
        return Difference(name, math.inf, note=f"{_short(got)} is not {_short(expected)}")
    expected = plain(expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return Difference(name, math.inf, note=f"{_short(got)} is not {_short(expected)}")
    expected = _dense(expected)
    # in double precision first: torch has no `abs` of truth values
    wide = torch.complex128 if expected.is_complex() else torch.float64
    finite = expected.detach().to(wide).abs().nan_to_num(nan=0.0, posinf=0.0)
    scale = float(finite.max()) if finite.numel() else 0.0
    if isinstance(got, SpreadTensor):
        # partial sums are summed first: a term by itself is not the value
        layout = got.layout.summed
        part, expected = got.move_to(layout).local, layout.local_part(expected)
    else:
        part = _dense(got)
    # In double precision the subtraction adds no rounding to the measured one.
    part, expected = part.detach().to(wide), expected.detach().to(wide)
    # Equal infinities, and NaN in both, are no difference; any other NaN is an error.
    same = (part == expected) | (torch.isnan(part) & torch.isnan(expected))
    apart = torch.where(same, 0, (part - expected).abs()).nan_to_num(nan=math.inf)
    error = float(apart.max()) if apart.numel() else 0.0
    return Difference(name, error, scale, str(got.dtype))


def worst(name: str, differences: Sequence[Difference]) -> Difference:
    """One for several: the largest error, and the first note."""
    if not differences:
        return Difference(name, 0.0)
    largest = max(differences, key=lambda each: -1.0 if math.isnan(each.error) else each.error)
    scale = max(each.scale for each in differences)
    note = next((each.note for each in differences if each.note), "")
    return replace(largest, scale=scale, note=note)


def _numbers(value: Any) -> Any:
    """Convert floating-point numbers to tensors; return anything else unchanged."""
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, float | complex | np.number):
        kind = torch.complex128 if isinstance(value, complex) else torch.float64
        return torch.as_tensor(value, dtype=kind)
    return value


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout != torch.strided else x


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{value!r:.40}" if isinstance(value, int | float | str | None) else type(value).__name__


@encodable
@dataclass(frozen=True)
class ModuleUse:
    """The statistics of a module in the converted model, the maximum over workers.

    Attributes:
        output: the difference of its output from that of one process.
        kind: the class of the module.
        bytes_sent: the bytes sent in its forward passes, including those of the modules in it.
        bytes_kept: the bytes of its outputs and of tensors saved for the backward pass.
        bytes_stored: the bytes of its parameters and buffers.
    """

    output: Difference
    kind: str
    bytes_sent: int = 0
    bytes_kept: int = 0
    bytes_stored: int = 0

    @property
    def name(self) -> str:
        """The name of the module in the model; empty for the model itself."""
        return self.output.name


@encodable
@dataclass(frozen=True)
class ModelReport:
    """The report of `check_model`; `print` shows it as tables, the same on all workers.

    Attributes:
        model: the class of the model.
        where: the partition or layout.
        values: the differences of outputs, the loss, gradients and buffers.
        modules: the statistics of each module, in the order in which they ended.
        gathers: the functions that gathered their operands.
        bytes_forward: the bytes sent in a forward pass, by the worker that sends most.
        bytes_backward: the bytes sent in the backward pass.
        peak: the largest number of bytes of tensors alive at the same time, on the worker with
            most.
        peak_alone: the same in one process.
        remarks: further remarks.
        attention: the way of each call of attention in a forward pass, such as "ring".

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
        """The modules whose outputs differ; start with the first one."""
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
        # differences first, since they matter most to a reader
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
                sizes = map(num_bytes, (each.bytes_sent, each.bytes_kept, each.bytes_stored))
                error, _, remark = _figures(each.output)
                uses.append((_named(each), each.kind, error, *sizes, remark))
            yield from _table(header, uses)
        if self.gathers:
            yield "\nFunctions without a rule, which gather their operands:"
            places = [(f"`{g.name}`", num_bytes(g.num_bytes), str(g.place)) for g in self.gathers]
            yield from _table(("function", "gathered", "place"), places)
        yield ""
        yield (
            f"A worker sends {num_bytes(self.bytes_forward)} forward and "
            f"{num_bytes(self.bytes_backward)} backward. Tensors created in a step take at most "
            f"{num_bytes(self.peak)}; in one process, {num_bytes(self.peak_alone)}."
        )
        if self.attention:
            counts = [f"{way} ({n})" for way, n in Counter(self.attention).items()]
            yield f"Ways of attention, and in how many calls: {', '.join(counts)}."
        yield from self.remarks


def merged(told: Sequence[ModelReport], rtol: float | None, atol: float | None) -> ModelReport:
    """The report of all workers, with the maximum of each number."""
    # Workers have the same values and modules in the same order, since they ran the same calls.
    first = told[0]
    values = [worst(v.name, [each.values[k] for each in told]) for k, v in enumerate(first.values)]
    gradients = [each.scale for each in values if each.name.startswith("gradient")]
    largest = max(gradients, default=0.0)
    kinds = {str(dtype): value for dtype, value in TOLERANCES.items()}

    def allowed(each: Difference) -> Difference:
        usual = kinds.get(each.dtype, 0.0)
        is_exact = usual == 0.0  # whole numbers
        usual_scale = largest if each.name.startswith("gradient") else 1.0
        scale = max(each.scale, FLOOR * usual_scale)
        relative = 0.0 if is_exact else usual if rtol is None else rtol
        return replace(each, allowed=relative * scale + (0.0 if is_exact else atol or 0.0))

    modules = []
    for k, module in enumerate(first.modules):
        uses = [each.modules[k] for each in told]
        most = _most(uses, "bytes_sent", "bytes_kept", "bytes_stored")
        output = worst(module.name, [each.output for each in uses])
        modules.append(replace(most, output=allowed(output)))
    report = replace(
        _most(told, "bytes_forward", "bytes_backward", "peak", "peak_alone"),
        values=tuple(map(allowed, values)),
        modules=tuple(modules),
    )
    if report.passed or any(each.dtype == "torch.float64" for each in values):
        return report
    remark = (
        "If this may be rounding, which norms of few values amplify, check with "
        "dtype=torch.float64."
    )
    return replace(report, remarks=(remark, *report.remarks))


def _most(several: Sequence[T], *figures: str) -> T:
    """The first of several, with the largest of each of these figures."""
    largest = {name: max(getattr(each, name) for each in several) for name in figures}
    return replace(several[0], **largest)  # type: ignore[type-var]


def _named(module: ModuleUse) -> str:
    return module.name or "(the model)"


def _figures(each: Difference) -> tuple[str, str, str]:
    """The error, the allowed error, and a remark."""
    remark = each.note or ("←" if each.differs else "")
    return _figure(each.error), _figure(each.allowed), remark


def _figure(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.1e}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows with columns as wide as their contents."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    for line in lines:
        yield "  " + "  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip()
