"""Layers whose weights lie in shards on the workers of a group, and what training them needs."""

from tessel.nn.parallel.clip import clip_grad_norm_ as clip_grad_norm_
from tessel.nn.parallel.cross_entropy import ParallelCrossEntropyLoss as ParallelCrossEntropyLoss
from tessel.nn.parallel.dropout import ParallelDropout as ParallelDropout
from tessel.nn.parallel.dropout import random_stream as random_stream
from tessel.nn.parallel.embedding import Embedding as Embedding
from tessel.nn.parallel.embedding import ParallelEmbedding as ParallelEmbedding
from tessel.nn.parallel.linear import ParallelLinear as ParallelLinear
from tessel.nn.parallel.register import RegisterParallelDim as RegisterParallelDim
from tessel.nn.parallel.replicas import data_parallel as data_parallel
from tessel.nn.parallel.replicas import gather_batch as gather_batch
from tessel.nn.parallel.replicas import get_data_parallel_group as get_data_parallel_group
from tessel.nn.parallel.replicas import (
    register_ddp_parameters_to_ignore as register_ddp_parameters_to_ignore,
)
from tessel.nn.parallel.scaler import ParallelGradScaler as ParallelGradScaler
from tessel.nn.parallel.state import collect_optimizer_state_dict as collect_optimizer_state_dict
from tessel.nn.parallel.state import collect_state_dict as collect_state_dict
from tessel.nn.parallel.state import relocate_optimizer_state_dict as relocate_optimizer_state_dict
from tessel.nn.parallel.state import relocate_state_dict as relocate_state_dict
