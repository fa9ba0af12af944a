"""Tensors spread over processes: distribution as linear algebra.

This module exports the public interface. It may import every package except `cli` and `viz`, which
import it.
"""

import importlib as _importlib
import sys as _sys
from typing import Any as _Any

from tessel.garbage import collected_later as _collected_later

with _collected_later():
    # First: the kernel imports `transport`, which imports `core.boxes`. If `transport` were
    # imported before, the kernel would find it partially initialized.
    from tessel import core as core
    from tessel import data as data
    from tessel import distributed as distributed
    from tessel import imaging as imaging
    from tessel import interop as interop
    from tessel import models as models
    from tessel import nn as nn
    from tessel import operators as operators
    from tessel import state as state
    from tessel import testing as testing
    from tessel import tracing as tracing
    from tessel.core.layout import Layout as Layout
    from tessel.core.layout import zero_volume_tensor as zero_volume_tensor
    from tessel.core.linop import LinearOperator as LinearOperator
    from tessel.core.move import Move as Move
    from tessel.core.partition import Partition as Partition
    from tessel.core.partition import world as world
    from tessel.data import load as load
    from tessel.data import save as save
    from tessel.distributed import get_parallel_dim as get_parallel_dim
    from tessel.distributed import register_parallel_attribute as register_parallel_attribute
    from tessel.distributed import register_parallel_dim as register_parallel_dim
    from tessel.distributed.slices import slices as _slices
    from tessel.errors import WorkerLost as WorkerLost
    from tessel.interop import from_dtensor as from_dtensor
    from tessel.launch import launch as launch
    from tessel.nn.parallel import (
        register_ddp_parameters_to_ignore as register_ddp_parameters_to_ignore,
    )
    from tessel.operators import ParDCT as ParDCT
    from tessel.operators import ParDFT as ParDFT
    from tessel.operators import ParDiagonal as ParDiagonal
    from tessel.operators import ParDST as ParDST
    from tessel.operators import ParIdentity as ParIdentity
    from tessel.operators import ParMatrix as ParMatrix
    from tessel.operators import ParMultilinear as ParMultilinear
    from tessel.operators import ParOperator as ParOperator
    from tessel.operators import ParReduce as ParReduce
    from tessel.operators import ParRepartition as ParRepartition
    from tessel.operators import ParRestriction as ParRestriction
    from tessel.operators import best_partition as best_partition
    from tessel.operators import distribute as distribute
    from tessel.operators import gradient as gradient
    from tessel.operators import init as init
    from tessel.operators import kron as kron
    from tessel.operators import vec as vec
    from tessel.primitives.repartition import all_gather as all_gather
    from tessel.primitives.repartition import gather as gather
    from tessel.primitives.repartition import scatter as scatter
    from tessel.state import collect_state_dict as collect_state_dict
    from tessel.state import relocate_state_dict as relocate_state_dict
    from tessel.tensor import Tensor as Tensor
    from tessel.tensor import arange as arange
    from tessel.tensor import contractions as _contractions
    from tessel.tensor import empty as empty
    from tessel.tensor import explain as explain
    from tessel.tensor import fallback as fallback
    from tessel.tensor import from_local as from_local
    from tessel.tensor import full as full
    from tessel.tensor import linspace as linspace
    from tessel.tensor import ones as ones
    from tessel.tensor import rand as rand
    from tessel.tensor import randint as randint
    from tessel.tensor import randn as randn
    from tessel.tensor import spread as spread
    from tessel.tensor import sum as sum
    from tessel.tensor import zeros as zeros
    from tessel.tracing import trace as trace
    from tessel.version import __version__ as __version__

# The kernel's modules were in this package before `core` existed. Code that imports them from here
# and files of `torch.save`, which name classes by their modules, still find them.
for _name in ("boxes", "windows", "partition", "layout", "plan", "move", "linop", "agreement"):
    _module = _importlib.import_module(f"tessel.core.{_name}")
    globals()[_name] = _sys.modules[f"tessel.{_name}"] = _module

# Names that are documented in `nn`, but belong to a higher layer, for whole models.
for _name in (
    *("ParallelGradScaler", "clip_grad_norm_", "collect_state_dict", "relocate_state_dict"),
    *("collect_optimizer_state_dict", "relocate_optimizer_state_dict"),
    *("save_weights", "load_weights"),
):
    setattr(nn, _name, getattr(state, _name))


def __getattr__(name: str) -> _Any:
    """The functions that opt_einsum looks up in the package of a tensor's class; not public."""
    if name in ("einsum", "tensordot", "transpose"):
        return getattr(_contractions, name)
    raise AttributeError(f"module 'tessel' has no attribute {name!r}")


slice = _slices  # bound only here, so that no module of the package loses the builtin
