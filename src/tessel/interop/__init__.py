"""Tessel and other parts of torch: sharded checkpoints of `torch.distributed.checkpoint`.

It may import `nn` and what is below it.
"""

from tessel.interop.checkpoint import ModelState as ModelState
from tessel.interop.checkpoint import OptimizerState as OptimizerState
from tessel.interop.checkpoint import Part as Part
