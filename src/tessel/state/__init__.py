"""The state of whole models whose parameters lie in shards: state dicts, sharded checkpoints,
clipping of gradients and scaling of losses.

It may import `nn` and what is below it. Most of its names are those of documents that have them in
`nn`, where users find them, too.
"""

from tessel.state.checkpoint import ModelState as ModelState
from tessel.state.checkpoint import OptimizerState as OptimizerState
from tessel.state.clip import clip_grad_norm_ as clip_grad_norm_
from tessel.state.scaler import ParallelGradScaler as ParallelGradScaler
from tessel.state.state_dicts import collect_optimizer_state_dict as collect_optimizer_state_dict
from tessel.state.state_dicts import collect_state_dict as collect_state_dict
from tessel.state.state_dicts import relocate_optimizer_state_dict as relocate_optimizer_state_dict
from tessel.state.state_dicts import relocate_state_dict as relocate_state_dict
