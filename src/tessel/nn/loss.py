"""Losses: one number for a whole tensor, shared by all workers of its partition.

The workers agree on their parts of the input and of the other tensors, and check for values for
which torch raises. Then their parts form spread tensors, and the loss is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tessel.core.agreement import agree, remember
from tessel.core.checksum import checksum
from tessel.core.context import setting
from tessel.core.layout import Layout, Shape
from tessel.core.linop import enter_by_values, is_traced
from tessel.nn.layer import Layer, Result
from tessel.nn.loss_agreement import (
    FINE,
    AgreedTarget,
    Said,
    class_dim,
    narrow_dim,
    said_of_classes,
    said_of_units,
    said_of_variance,
    samples_of,
)
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.losses import checked
from tessel.tensor.rules.reductions import without


class DistributedLossBase(Layer):
    """A loss over a partitioned tensor: torch's own loss of spread tensors, one shared value.

    A subclass derives from this and from torch's own loss, whose arguments and defaults it has. All
    workers hold the same weights. The target has the layout of the input.
    """

    reduction: str
    setting_names: tuple[str, ...] = ("reduction",)  # attributes that torch's `forward` reads
    weight_names: tuple[str, ...] = ()  # and tensors
    # the keys of the calls contain addresses of weights in this process
    _derived = Layer._derived | {"_calls"}

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # torch's names
        return super().forward(input, target)

    def compute(self, x: Tensor, layout: Layout, *args: Any, **settings: Any) -> Result:
        others = self.agree_on_others(x, layout, *args)
        with setting(checked, True):  # no value is wrong
            return super().compute(x, layout, *others, **settings)

    def fits_torch(self, layout: Layout, *others: Any) -> bool:
        """Whether the other tensors have the shape of an input that one worker has."""
        # Torch would broadcast another shape; on several workers it raises, and so it does here.
        return all(_shape(each) == layout.shape for each in others)

    def agree_on_others(self, x: Tensor, layout: Layout, *args: Any) -> tuple[Any, ...]:
        """The other arguments as spread tensors, after all workers agreed on them."""
        (target,) = args
        return (self.agree_on_target(x, target, layout),)

    def agree_on_target(
        self, x: Tensor, target: Tensor, layout: Layout, note: str = ""
    ) -> SpreadTensor:
        said = self.said_of(x)
        return self.agree_on("target", target, said, lambda each: each.fitting(layout), note)

    def said_of(self, x: Tensor) -> Callable[[Any], Said]:
        """A function that finds invalid values in this worker's part of the target."""
        return lambda target: FINE

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        """The weights, whole."""
        return tuple(getattr(self, name) for name in self.weight_names)

    def agree_on(
        self,
        name: str,
        value: Any,
        said: Callable[[Any], Said],
        conclude: Callable[[AgreedTarget], Layout],
        note: str = "",
    ) -> SpreadTensor:
        """A tensor besides the input as a spread tensor, with a layout that all workers conclude.

        Args:
            name: the name of the tensor.
            value: this worker's part of it.
            said: this worker's statement on its values.
            conclude: a function that returns its layout, or raises on all workers.
            note: further text that distinguishes this call.
        """
        in_graph = is_traced()  # otherwise label and settings, which take long, are not needed
        agreed, value = enter_by_values(
            partial(self._learn, name, note=note),
            (value,),
            said,
            conclude,
            f"the {name} of {self!r}" if in_graph else "",
            self.P_x.prepare(),
            self,  # type: ignore[arg-type]
            self.__dict__.setdefault("_agreements", {}),
            (name, note, self._settings) if in_graph else None,
        )
        return agreed.spread(value, conclude(agreed))

    def _learn(self, name: str, value: Any, said: Said = FINE, note: str = "") -> AgreedTarget:
        """Learn from all workers their parts of a tensor besides the input."""
        # A checksum reads all of a weight: it is made again only when torch has counted a change.
        weights = () if is_traced() else self.weights  # which have no values in a trace
        key = (note, self._settings, *map(_version, weights))
        calls: dict[Any, tuple[str, str]] = self.__dict__.setdefault("_calls", {})
        if key not in calls:
            sums = ", ".join(f"{checksum(each):x}" for each in weights if each is not None)
            label = f"{self!r}{note}" + (f" with weights of checksum {sums}" if sums else "")
            remember(calls, key, (label, f"{label} {self._settings}"))
        call, identity = calls[key]  # in words, and all in which workers must be alike
        [(shapes, meta)], numbers = agree(
            self.P_x,
            call,
            value,
            names=[f"the {name}"],
            numbers=said,
            identity=f"the {name} of {identity}",
        )
        return AgreedTarget(self, name, shapes, meta, numbers)

    @property
    def _settings(self) -> tuple[Any, ...]:
        """Everything that must be equal on all workers, except the values of weights."""
        plain = tuple((name, getattr(self, name)) for name in self.setting_names)
        return plain, tuple(
            None if each is None else (each.dtype, each.device.type, each.requires_grad, each.shape)
            for each in self.weights
        )

    def extra_repr(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self._settings[0]]
        return ", ".join([super().extra_repr(), *settings])


def _shape(value: Any) -> Shape | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _version(weight: Tensor | None) -> Any:
    """A key that changes on this worker when a weight does."""
    if weight is None or weight.is_inference():  # torch does not count changes of these
        return None
    return weight.data_ptr(), weight._version  # another tensor, or another value of it


class DistributedL1Loss(DistributedLossBase, torch.nn.L1Loss):
    """The absolute error of a tensor that is spread over `P_x`: `torch.nn.L1Loss`.

    Forward:  L = mean or sum of |x − y|, on every worker; with "none", this worker's part of it.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        size_average, reduce: torch's deprecated arguments for reductions.
        reduction: "mean", "sum" or "none".

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedL1Loss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(1.)
    """


class DistributedMSELoss(DistributedLossBase, torch.nn.MSELoss):
    """The squared error of a tensor that is spread over `P_x`: `torch.nn.MSELoss`.

    Forward:  L = mean or sum of (x − y)², on every worker; with "none", this worker's part of it.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        size_average, reduce: torch's deprecated arguments for reductions.
        reduction: "mean", "sum" or "none".

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedMSELoss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(1.)
    """


class DistributedSmoothL1Loss(DistributedLossBase, torch.nn.SmoothL1Loss):
    """The smooth absolute error of a tensor spread over `P_x`: `torch.nn.SmoothL1Loss`.

    Forward:  L = mean or sum of d²/2β where d = |x − y| < β, else d − β/2, on every worker.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        size_average, reduce: torch's deprecated arguments for reductions.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        beta: the distance below which the loss is quadratic.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedSmoothL1Loss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(0.5000)
    """

    setting_names = ("reduction", "beta")


class DistributedHuberLoss(DistributedLossBase, torch.nn.HuberLoss):
    """The Huber loss of a tensor that is spread over `P_x`: `torch.nn.HuberLoss`.

    Forward:  L = mean or sum of d²/2 where d = |x − y| < δ, else δ(d − δ/2), on every worker.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        delta: the distance below which the loss is quadratic.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedHuberLoss(P)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(0.5000)
    """

    setting_names = ("reduction", "delta")


class DistributedBCELoss(DistributedLossBase, torch.nn.BCELoss):
    """The binary cross entropy of a tensor that is spread over `P_x`: `torch.nn.BCELoss`.

    Forward:  L = mean or sum of −w(y·log x + (1 − y)·log(1 − x)), on every worker.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        weight: the weight of each element; the same whole tensor on every worker, broadcast to the
            whole input.
        size_average, reduce: torch's deprecated arguments for reductions.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedBCELoss(P)(torch.ones(2, 3) / 2, torch.ones(2, 3))
    tensor(0.6931)
    """

    weight_names = ("weight",)

    def compute(self, x: Tensor, layout: Layout, *args: Any, **settings: Any) -> Result:
        if is_traced():  # the values of x exist only in a run
            x = self.agree_on("input", x, said_of_units, lambda each: each.fitting(layout)).local
        return super().compute(x, layout, *args, **settings)

    def said_of(self, x: Tensor) -> Callable[[Any], Said]:
        if is_traced():
            return partial(said_of_units, first=2)
        return partial(said_of_units, x)


class DistributedBCEWithLogitsLoss(DistributedLossBase, torch.nn.BCEWithLogitsLoss):
    """The binary cross entropy of logits spread over `P_x`: `torch.nn.BCEWithLogitsLoss`.

    Forward:  L = mean or sum of −w(p·y·log σ(x) + (1 − y)·log(1 − σ(x))), on every worker.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        weight: the weight of each element; the same whole tensor on every worker, broadcast to the
            whole input.
        size_average, reduce: torch's deprecated arguments for reductions.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        pos_weight: the weight of positive targets, broadcast likewise.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedBCEWithLogitsLoss(P)(torch.zeros(2, 3), torch.ones(2, 3))
    tensor(0.6931)
    """

    weight_names = ("weight", "pos_weight")


class DistributedKLDivLoss(DistributedLossBase, torch.nn.KLDivLoss):
    """The Kullback-Leibler divergence of log-probabilities over `P_x`: `torch.nn.KLDivLoss`.

    Forward:  L = mean or sum of y(log y − x), or that sum over the whole batch size, on every
    worker.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        size_average, reduce: torch's deprecated arguments for reductions.
        reduction: "mean", "batchmean", "sum" or "none", which gives this worker's part.
        log_target: whether the target is given as logarithms.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> loss = tessel.nn.DistributedKLDivLoss(P, reduction="batchmean")
    >>> loss(torch.zeros(2, 2), torch.ones(2, 2) / 2)
    tensor(-0.6931)
    """

    setting_names = ("reduction", "log_target")


class DistributedPoissonNLLLoss(DistributedLossBase, torch.nn.PoissonNLLLoss):
    """Minus the log-likelihood of Poisson rates spread over `P_x`: `torch.nn.PoissonNLLLoss`.

    Forward:  L = mean or sum of exp(x) − y·x, or of x − y·log(x + ε), on every worker.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        log_input: whether the input is the logarithm of the rate.
        full: whether to add Stirling's approximation of the constant.
        size_average, reduce: torch's deprecated arguments for reductions.
        eps: added to a rate before its logarithm.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedPoissonNLLLoss(P)(torch.zeros(2, 3), torch.ones(2, 3))
    tensor(1.)
    """

    setting_names = ("reduction", "log_input", "full", "eps")

    def forward(self, log_input: Tensor, target: Tensor) -> Tensor:  # torch's own names
        return super().forward(log_input, target)


class DistributedGaussianNLLLoss(DistributedLossBase, torch.nn.GaussianNLLLoss):
    """Minus the log-likelihood of Gaussian means spread over `P_x`: `torch.nn.GaussianNLLLoss`.

    Forward:  L = mean or sum of (log v + (x − y)²/v)/2, on every worker, where v is at least ε.

    The variance is a number, or has the layout of the input, or has length one along one dimension
    or lacks the last; then workers along the axes that split this dimension hold the same values.
    If no worker has more than one element along a dimension, a variance of length one along it is
    assumed to have the layout of the input.

    Args:
        P_x: the partition of input and target; axis d splits dimension d.
        full: whether to add the constant log(2π)/2.
        eps: the smallest variance.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> loss = tessel.nn.DistributedGaussianNLLLoss(P)
    >>> loss(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3))
    tensor(0.5000)
    """

    setting_names = ("reduction", "full", "eps")

    def can_be_traced(self, *args: Any, **settings: Any) -> bool:
        """False: like torch's own loss it reads the variance, which full graphs do not support."""
        return False

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor, var: Tensor | float
    ) -> Tensor:
        return Layer.forward(self, input, target, var)

    def agree_on_others(self, x: Tensor, layout: Layout, *args: Any) -> tuple[Any, ...]:
        target, var = args
        if not isinstance(var, Tensor):
            return self.agree_on_target(x, target, layout, f" with var={var!r}"), var
        # the target first: its note distinguishes workers that pass a number
        goal = self.agree_on_target(x, target, layout, " and var")
        agreed = self._learn("var", var, said_of_variance(var, layout), "")
        dim = narrow_dim(agreed.shapes, layout)
        if dim is None:
            return goal, agreed.spread(var, agreed.fitting(layout))
        agreed.check_values()
        agreed.check_copies(layout, layout.cuts[dim].axes)
        var = var if var.ndim == len(layout.shape) else var.unsqueeze(-1)
        return goal, agreed.spread(var, without(layout, (dim,), True)[1])


class _OverClasses(DistributedLossBase):
    """A loss over classes, which stand along dimension 1, or 0 of an input without a batch."""

    ignore_index: int
    setting_names: tuple[str, ...] = ("reduction", "ignore_index")
    weight_names = ("weight",)
    takes_probabilities = False

    def fits_torch(self, layout: Layout, *others: Any) -> bool:
        shape = _shape(others[0])
        is_probable = self.takes_probabilities and shape == layout.shape
        return is_probable or shape == samples_of(layout.shape)

    def agree_on_others(self, x: Tensor, layout: Layout, *args: Any) -> tuple[Any, ...]:
        (target,) = args
        dim = class_dim(len(layout.shape))
        # if classes are split, the workers that have them must pass the same targets
        is_copy = layout.is_split(dim)

        def said(target: Any) -> Said:
            return said_of_classes(target, layout.shape[dim], self.ignore_index, is_copy)

        def conclude(agreed: AgreedTarget) -> Layout:
            num_dims = len(next(iter(agreed.shapes.values())))
            if self.takes_probabilities and num_dims == len(layout.shape):
                return agreed.fitting(layout)
            agreed.fitting(layout, samples := without(layout, (dim,), False)[1])
            if is_copy:
                agreed.check_copies(layout, layout.cuts[dim].axes)
            return samples

        return (self.agree_on("target", target, said, conclude),)


class DistributedCrossEntropyLoss(_OverClasses, torch.nn.CrossEntropyLoss):
    """The cross entropy of logits that are spread over `P_x`: `torch.nn.CrossEntropyLoss`.

    Forward:  L = Σ w[y]·(−log softmax(x)[y]) / Σ w[y] on every worker; not divided for "sum".

    The target has the layout of the input. Classes, unlike probabilities, have no dimension 1:
    workers among which dimension 1 of the input is split hold the same classes, and the result of
    "none" is the same on them.

    Args:
        P_x: the partition of the input; axis d splits dimension d.
        weight: the weight of each class, the same on every worker.
        size_average, reduce: torch's deprecated arguments for reductions.
        ignore_index: a target that is ignored.
        reduction: "mean", "sum" or "none", which gives this worker's part.
        label_smoothing: the share of the uniform distribution in the target.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedCrossEntropyLoss(P)(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor(0.6931)
    """

    setting_names = ("reduction", "ignore_index", "label_smoothing")
    takes_probabilities = True


class DistributedNLLLoss(_OverClasses, torch.nn.NLLLoss):
    """Minus the log-likelihood of classes that are spread over `P_x`: `torch.nn.NLLLoss`.

    Forward:  L = Σ w[y]·(−x[y]) / Σ w[y] on every worker; not divided for "sum".

    The target has no dimension 1 and is split along the others like the input: workers among which
    dimension 1 of the input is split hold the same classes, and the result of "none" is the same on
    them.

    Args:
        P_x: the partition of the input; axis d splits dimension d.
        weight: the weight of each class, the same on every worker.
        size_average, reduce: torch's deprecated arguments for reductions.
        ignore_index: a target that is ignored.
        reduction: "mean", "sum" or "none", which gives this worker's part.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedNLLLoss(P)(-torch.ones(2, 2), torch.tensor([0, 1]))
    tensor(1.)
    """
