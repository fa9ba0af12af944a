"""Data movements as torch modules."""

from tessel.nn.conv_transpose import DistributedConvTranspose1d as DistributedConvTranspose1d
from tessel.nn.conv_transpose import DistributedConvTranspose2d as DistributedConvTranspose2d
from tessel.nn.conv_transpose import DistributedConvTranspose3d as DistributedConvTranspose3d
from tessel.nn.convolution import DistributedConv1d as DistributedConv1d
from tessel.nn.convolution import DistributedConv2d as DistributedConv2d
from tessel.nn.convolution import DistributedConv3d as DistributedConv3d
from tessel.nn.linear import DistributedLinear as DistributedLinear
from tessel.nn.pooling import DistributedAvgPool1d as DistributedAvgPool1d
from tessel.nn.pooling import DistributedAvgPool2d as DistributedAvgPool2d
from tessel.nn.pooling import DistributedAvgPool3d as DistributedAvgPool3d
from tessel.nn.pooling import DistributedMaxPool1d as DistributedMaxPool1d
from tessel.nn.pooling import DistributedMaxPool2d as DistributedMaxPool2d
from tessel.nn.pooling import DistributedMaxPool3d as DistributedMaxPool3d
from tessel.nn.pooling import DistributedPoolingBase as DistributedPoolingBase
from tessel.primitives.all_gather import AllGather as AllGather
from tessel.primitives.all_gather import ReduceScatter as ReduceScatter
from tessel.primitives.all_sum_reduce import AllSumReduce as AllSumReduce
from tessel.primitives.broadcast import Broadcast as Broadcast
from tessel.primitives.broadcast import SumReduce as SumReduce
from tessel.primitives.halo_exchange import HaloExchange as HaloExchange
from tessel.primitives.repartition import Repartition as Repartition
from tessel.nn.convert import distribute_module as distribute_module
