"""Tessel and other parts of torch: sharded checkpoints of `torch.distributed.checkpoint`.

It may import `state`, where they are implemented, and packages below it.
"""

from tessel.state.checkpoint import ModelState as ModelState
from tessel.state.checkpoint import OptimizerState as OptimizerState
from tessel.state.checkpoint import Part as Part
from tessel.state.checkpoint import checkpoint_reader as checkpoint_reader
