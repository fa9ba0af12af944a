"""The state of sharded models: state dicts, sharded checkpoints, gradient clipping, loss scaling.

It may import `nn` and packages below it. Most of its names are also in `nn`, where users expect
them.
"""

from tessel.state.checkpoint import ModelState as ModelState
from tessel.state.checkpoint import OptimizerState as OptimizerState
from tessel.state.checkpoint import Part as Part
from tessel.state.clip import clip_grad_norm_ as clip_grad_norm_
from tessel.state.folders import read_parts as read_parts
from tessel.state.folders import remove as remove
from tessel.state.folders import stored_in as stored_in
from tessel.state.folders import whole_folder as whole_folder
from tessel.state.folders import write_parts as write_parts
from tessel.state.raising import together as together
from tessel.state.scaler import ParallelGradScaler as ParallelGradScaler
from tessel.state.state_dicts import collect_optimizer_state_dict as collect_optimizer_state_dict
from tessel.state.state_dicts import collect_state_dict as collect_state_dict
from tessel.state.state_dicts import relocate_optimizer_state_dict as relocate_optimizer_state_dict
from tessel.state.state_dicts import relocate_state_dict as relocate_state_dict
from tessel.state.tensor_file import TensorFile as TensorFile
from tessel.state.tensor_file import TensorFileWriter as TensorFileWriter
from tessel.state.weights import load_weights as load_weights
from tessel.state.weights import save_weights as save_weights
