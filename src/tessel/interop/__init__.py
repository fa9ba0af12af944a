"""Tessel and other parts of torch: DTensors as spread tensors, and names for sharded checkpoints.

`dtensors.py` converts DTensors. The names for `torch.distributed.checkpoint` are those of
`tessel.state.checkpoint`, which implements them. It may import `state` and packages below it.
"""

from tessel.interop.dtensors import from_dtensor as from_dtensor
from tessel.interop.dtensors import layout_of as layout_of
from tessel.state.checkpoint import ModelState as ModelState
from tessel.state.checkpoint import OptimizerState as OptimizerState
from tessel.state.checkpoint import Part as Part
from tessel.state.checkpoint import checkpoint_reader as checkpoint_reader
