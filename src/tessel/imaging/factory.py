"""make_distrib_bundle: all parts of a distributed inverse problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor

from tessel.errors import check_choice
from tessel.imaging.context import DistributedContext
from tessel.imaging.distribution_strategies.strategies import (
    DistributedSignalStrategy,
    check_its_own,
    checked_sizes,
    create_strategy,
    maker_of,
)
from tessel.imaging.fidelity import REDUCTIONS, DistributedDataFidelity
from tessel.imaging.linear_physics import DistributedLinearPhysics
from tessel.imaging.measurements import DistributedMeasurements, check_counts
from tessel.imaging.physics import DistributedPhysics, Factory
from tessel.imaging.prior import DistributedPrior, Strategy
from tessel.imaging.signal import DistributedSignal, Grid

_LISTED = ("physics", "measurements", "data_fidelity")  # the arguments that may be lists


@dataclass(frozen=True)
class FactoryConfig:
    """The operators, measurements and data fidelities of an inverse problem.

    Each is a list (of operators, tensors, data fidelities), such as deepinv's `StackedPhysics` and
    `TensorList`, or a function of (i, device, shared) that makes object i where it is needed.

    Args:
        physics: the operators.
        measurements: as many tensors.
        data_fidelity: one for all operators, a list of them, or a function; None for ½‖A(x) − y‖².
        num_operators: the number of operators, needed for functions.
        shared: objects that functions may use, by name; see `DistributedPhysics`.
        linear: whether the operators are linear and have an adjoint; None: operators in a list are
            linear if they have one, those of a function always.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import FactoryConfig
    >>> physics = SimpleNamespace(A=lambda x: x, A_adjoint=lambda y: y)
    >>> FactoryConfig(physics=[physics] * 2, measurements=[torch.ones(1)] * 2).count
    2
    """

    physics: Any
    measurements: Any
    data_fidelity: Any = None
    num_operators: int | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    linear: bool | None = None

    def __post_init__(self) -> None:
        for name in _LISTED:
            items = items_of(getattr(self, name))
            if items is not None:  # lists, stacks and single items become lists
                object.__setattr__(self, name, items)
        for name, what in (("physics", "operators"), ("measurements", "tensors")):
            given = getattr(self, name)
            if not (isinstance(given, list) or callable(given)):
                raise ValueError(
                    f"FactoryConfig: {name} must be a list of {what} or a function of (i, device, "
                    f"shared), got {type(given).__name__}"
                )
        if isinstance(self.physics, list) and isinstance(self.measurements, list):
            check_counts(len(self.physics), len(self.measurements))
        counts = self._counts
        if not counts and self.num_operators is None:
            raise ValueError(
                "FactoryConfig: pass num_operators, the number of operators that the function "
                f"physics={self.physics!r} creates; got num_operators=None"
            )
        for name, count in counts.items():
            if count != self.count:
                raise ValueError(
                    f"FactoryConfig: there are {self.count} operators, but {name} has {count}"
                )
        if self.count < 1:
            raise ValueError(f"FactoryConfig: expected at least one operator, got {self.count}")

    @property
    def count(self) -> int:
        """The number of operators."""
        if self.num_operators is not None:
            return self.num_operators
        return next(iter(self._counts.values()))

    @property
    def is_linear(self) -> bool:
        """Whether the operators are linear."""
        if self.linear is not None:
            return self.linear
        listed = self.physics if isinstance(self.physics, list) else []
        return all(hasattr(each, "A_adjoint") for each in listed)

    @property
    def _counts(self) -> dict[str, int]:
        """The number of items of each list; functions have none."""
        given = {name: getattr(self, name) for name in _LISTED}
        return {name: len(each) for name, each in given.items() if isinstance(each, list)}


@dataclass(frozen=True)
class TilingConfig:
    """How a prior is applied to a large image: in patches, with a receptive field around each.

    Args:
        patch_size: the size of each patch, a number or one for each spatial dimension; None, only
            for "smart_tiling", for one patch: the whole image or, with an image in parts, each
            part.
        receptive_field_size: the width that is read on each side of a patch, as the prior needs.
        overlap: False: a patch writes only itself. True: patches with their surroundings are
            blended, with weights that sum to one.
        strategy: "smart_tiling", "basic", or a class or strategy of your own; a strategy has
            settings of its own and takes none of these.
        stride: patches start at multiples of it, as networks need that halve their input; only for
            "smart_tiling".
        max_batch_size: the largest number of patches that go to the prior at once; None for no
            limit.

    >>> from tessel.imaging import TilingConfig
    >>> TilingConfig(patch_size=128, receptive_field_size=32).make((1, 3, 256, 200))
    SmartTilingStrategy(4 patches of (1, 3, 256, 200))
    """

    patch_size: int | Sequence[int] | None = 256
    receptive_field_size: int | Sequence[int] = 64
    overlap: bool = False
    strategy: Strategy = "smart_tiling"
    stride: int | Sequence[int] = 1
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("patch_size", "receptive_field_size", "stride", "max_batch_size"):
            if getattr(self, name) is not None:
                least = 0 if name == "receptive_field_size" else 1
                checked_sizes(name, getattr(self, name), None, least)
        if isinstance(self.strategy, str):
            maker_of(self.strategy)
        if self.strategy == "basic" and self.stride != 1:
            raise ValueError(f"stride={self.stride} is only used by 'smart_tiling', got 'basic'")
        if self.strategy == "basic" and self.patch_size is None:
            raise ValueError("patch_size=None, one patch, is only for 'smart_tiling', got 'basic'")
        if isinstance(self.strategy, DistributedSignalStrategy):
            others = [each for each in fields(self) if each.name != "strategy"]
            given = {each.name: getattr(self, each.name) for each in others}
            check_its_own(self.strategy, given, {each.name: each.default for each in others})

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the strategy."""
        if isinstance(self.strategy, DistributedSignalStrategy):
            return {}
        all_of_it: dict[str, Any] = {
            "patch_size": self.patch_size,
            "receptive_field_size": self.receptive_field_size,
            "overlap": self.overlap,
            "max_batch_size": self.max_batch_size,
        }
        return all_of_it if self.strategy == "basic" else {**all_of_it, "stride": self.stride}

    @classmethod
    def of_image(cls, size: Sequence[int]) -> Self:
        """The default, or one patch for an image that is no larger than a default patch."""
        default = cls()
        assert isinstance(default.patch_size, int)
        # not None, which would be one patch for each part
        return cls(patch_size=tuple(size)) if max(size) <= default.patch_size else default

    def make(self, signal_shape: Sequence[int]) -> DistributedSignalStrategy:
        """The strategy for an image of this shape."""
        return create_strategy(self.strategy, signal_shape, **self.settings)


@dataclass(frozen=True)
class Bundle:
    """All parts of a distributed inverse problem."""

    physics: DistributedPhysics
    measurements: DistributedMeasurements
    data_fidelity: DistributedDataFidelity
    signal: DistributedSignal
    prior: DistributedPrior | None = None


def make_distrib_bundle(
    ctx: DistributedContext,
    *,
    factory_config: FactoryConfig,
    signal_shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    reduction: str = "mean",
    prior: Any = None,
    tiling: TilingConfig | None = None,
    partition: Grid | None = None,
) -> Bundle:
    """Make operators, measurements, data fidelity, signal and prior over the workers.

    Args:
        ctx: the workers.
        factory_config: the operators, measurements and data fidelities.
        signal_shape: the shape of the image, as (batch, channels, height, width).
        dtype: the dtype of the image.
        reduction: "mean" or "sum" over the operators, see `DistributedDataFidelity`.
        prior: a prior or denoiser, if there is one.
        tiling: how the prior is applied to the image; None for `TilingConfig()`, patches of 256
            with 64 around them, or one patch for an image that is no larger.
        partition: how the image is split, see `DistributedSignal`; None for the whole image on
            every worker.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, FactoryConfig, make_distrib_bundle
    >>> physics = SimpleNamespace(A=lambda x: 2 * x, A_adjoint=lambda y: 2 * y)
    >>> config = FactoryConfig(physics=[physics] * 2, measurements=[torch.ones(1, 1, 2, 2)] * 2)
    >>> with DistributedContext() as ctx:
    ...     bundle = make_distrib_bundle(ctx, factory_config=config, signal_shape=(1, 1, 2, 2))
    ...     bundle.data_fidelity.grad(bundle.signal).sum()
    tensor(-8.)
    """
    check_choice("reduction", reduction, REDUCTIONS)
    if tiling is not None and prior is None:
        raise ValueError(f"tiling={tiling} requires a prior, got prior=None")
    config, shared = factory_config, dict(factory_config.shared)
    signal = DistributedSignal(ctx, signal_shape, dtype, partition)
    kind = DistributedLinearPhysics if config.is_linear else DistributedPhysics
    of_all = {"physics": config.physics} if isinstance(config.physics, list) else {}
    physics = kind(ctx, config.count, _maker(config.physics), shared | of_all, signal.layout)
    make = _maker(config.measurements)
    measurements = DistributedMeasurements(ctx, config.count, make, shared, physics)
    given = config.data_fidelity
    make_fidelity: Factory | None = None
    # Data fidelities can also be called, so that only plain functions are taken as factories.
    if isinstance(given, FunctionType | MethodType | partial):
        make_fidelity = given
    elif given is not None:
        each = given if isinstance(given, list) else [given] * config.count
        make_fidelity, shared["data_fidelity"] = _maker(each), each
    fidelity = DistributedDataFidelity(ctx, physics, measurements, make_fidelity, reduction, shared)
    if prior is None:
        return Bundle(physics, measurements, fidelity, signal)
    tiling = tiling or TilingConfig.of_image(signal.shape[2:])
    spread = DistributedPrior(
        ctx, prior, tiling.strategy, signal.shape, tiling.settings, signal.layout
    )
    return Bundle(physics, measurements, fidelity, signal, spread)


def _maker(given: Any) -> Factory:
    """A function that makes object i, from a list or from a function."""
    if isinstance(given, list):
        return lambda i, device, shared: on_device(given[i], device)
    make: Factory = given
    return make


def on_device(item: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """An object on a device, if it can be moved there."""
    if not hasattr(item, "to"):
        return item
    return item.to(device) if dtype is None else item.to(device=device, dtype=dtype)


def items_of(given: Any) -> list[Any] | None:
    """The items of a list or stack, a single operator or tensor as a list; None for others.

    >>> items_of(("a", "b")), items_of(torch.ones(1)), items_of(len)
    (['a', 'b'], [tensor([1.])], None)
    """
    # By length and index, not by `physics_list`: a product of operators also has such a list, and
    # is one operator.
    stack = getattr(given, "data_fidelity_list", given)
    # Adjoints and gradients are summed over operators here, as a stack's own are by default.
    reduction = getattr(stack, "reduction", sum)
    if reduction is not sum and hasattr(stack, "physics_list"):
        raise ValueError(
            f"{type(given).__name__} combines images of its operators by {reduction!r}, which is "
            "not the adjoint; create it with reduction='sum', and pass reduce_op='mean' to methods "
            "for a mean"
        )
    is_long = hasattr(stack, "__len__") and hasattr(stack, "__getitem__")
    if is_long and not isinstance(stack, Tensor | str | Mapping):
        return [stack[i] for i in range(len(stack))]
    return [given] if isinstance(given, Tensor) or hasattr(given, "A") else None
