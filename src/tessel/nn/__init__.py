"""Data movements as torch modules."""

from tessel.primitives.all_gather import AllGather as AllGather
from tessel.primitives.all_gather import ReduceScatter as ReduceScatter
from tessel.primitives.all_sum_reduce import AllSumReduce as AllSumReduce
from tessel.primitives.broadcast import Broadcast as Broadcast
from tessel.primitives.broadcast import SumReduce as SumReduce
from tessel.primitives.halo_exchange import HaloExchange as HaloExchange
from tessel.primitives.repartition import Repartition as Repartition
