"""Tensor parallelism: the group of workers, its four movements, and shards.

It may import `tensor`, whose table determines what torch's functions do to shards, and packages
below it.
"""

from tessel.distributed.group import destroy_process_group as destroy_process_group
from tessel.distributed.group import get_group as get_group
from tessel.distributed.group import get_group_size as get_group_size
from tessel.distributed.group import get_rank as get_rank
from tessel.distributed.group import get_world_size as get_world_size
from tessel.distributed.group import init_process_group as init_process_group
from tessel.distributed.group import is_initialized as is_initialized
from tessel.distributed.movements import copy as copy
from tessel.distributed.movements import gather as gather
from tessel.distributed.movements import reduce as reduce
from tessel.distributed.movements import scatter as scatter
from tessel.distributed.shards import Shard as Shard
from tessel.distributed.shards import get_parallel_dim as get_parallel_dim
from tessel.distributed.shards import register_parallel_attribute as register_parallel_attribute
from tessel.distributed.shards import register_parallel_dim as register_parallel_dim
