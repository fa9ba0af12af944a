"""Layers whose weights are sharded over the workers of a group, and replicas of models.

It may import `nn.layer`, `distributed`, `tensor` and packages below them.
"""

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
