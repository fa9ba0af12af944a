"""Data movements and layers as torch modules, and the conversion of torch models.

It may import `distributed`, `tensor`, `operators`, `primitives` and packages below them.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from tessel.nn import functional as functional
from tessel.nn import init as init
from tessel.nn.adaptive import DistributedAdaptiveAvgPool1d as DistributedAdaptiveAvgPool1d
from tessel.nn.adaptive import DistributedAdaptiveAvgPool2d as DistributedAdaptiveAvgPool2d
from tessel.nn.adaptive import DistributedAdaptiveAvgPool3d as DistributedAdaptiveAvgPool3d
from tessel.nn.adaptive import DistributedAdaptiveMaxPool1d as DistributedAdaptiveMaxPool1d
from tessel.nn.adaptive import DistributedAdaptiveMaxPool2d as DistributedAdaptiveMaxPool2d
from tessel.nn.adaptive import DistributedAdaptiveMaxPool3d as DistributedAdaptiveMaxPool3d
from tessel.nn.buckets import fuse_gradients as fuse_gradients
from tessel.nn.conv_transpose import DistributedConvTranspose1d as DistributedConvTranspose1d
from tessel.nn.conv_transpose import DistributedConvTranspose2d as DistributedConvTranspose2d
from tessel.nn.conv_transpose import DistributedConvTranspose3d as DistributedConvTranspose3d
from tessel.nn.convert import distribute_module as distribute_module
from tessel.nn.convolution import DistributedConv1d as DistributedConv1d
from tessel.nn.convolution import DistributedConv2d as DistributedConv2d
from tessel.nn.convolution import DistributedConv3d as DistributedConv3d
from tessel.nn.init import shard_init_helper_ as shard_init_helper_
from tessel.nn.linear import DistributedLinear as DistributedLinear
from tessel.nn.loss import DistributedBCELoss as DistributedBCELoss
from tessel.nn.loss import DistributedBCEWithLogitsLoss as DistributedBCEWithLogitsLoss
from tessel.nn.loss import DistributedCrossEntropyLoss as DistributedCrossEntropyLoss
from tessel.nn.loss import DistributedGaussianNLLLoss as DistributedGaussianNLLLoss
from tessel.nn.loss import DistributedHuberLoss as DistributedHuberLoss
from tessel.nn.loss import DistributedKLDivLoss as DistributedKLDivLoss
from tessel.nn.loss import DistributedL1Loss as DistributedL1Loss
from tessel.nn.loss import DistributedMSELoss as DistributedMSELoss
from tessel.nn.loss import DistributedNLLLoss as DistributedNLLLoss
from tessel.nn.loss import DistributedPoissonNLLLoss as DistributedPoissonNLLLoss
from tessel.nn.loss import DistributedSmoothL1Loss as DistributedSmoothL1Loss
from tessel.nn.norm import DistributedBatchNorm as DistributedBatchNorm
from tessel.nn.norm import DistributedBatchNorm1d as DistributedBatchNorm1d
from tessel.nn.norm import DistributedBatchNorm2d as DistributedBatchNorm2d
from tessel.nn.norm import DistributedBatchNorm3d as DistributedBatchNorm3d
from tessel.nn.norm import DistributedGroupNorm as DistributedGroupNorm
from tessel.nn.norm import DistributedInstanceNorm as DistributedInstanceNorm
from tessel.nn.norm import DistributedInstanceNorm1d as DistributedInstanceNorm1d
from tessel.nn.norm import DistributedInstanceNorm2d as DistributedInstanceNorm2d
from tessel.nn.norm import DistributedInstanceNorm3d as DistributedInstanceNorm3d
from tessel.nn.norm import DistributedLayerNorm as DistributedLayerNorm
from tessel.nn.norm import DistributedRMSNorm as DistributedRMSNorm
from tessel.nn.parallel import Embedding as Embedding
from tessel.nn.parallel import ParallelCrossEntropyLoss as ParallelCrossEntropyLoss
from tessel.nn.parallel import ParallelDropout as ParallelDropout
from tessel.nn.parallel import ParallelEmbedding as ParallelEmbedding
from tessel.nn.parallel import ParallelLinear as ParallelLinear
from tessel.nn.parallel import RegisterParallelDim as RegisterParallelDim
from tessel.nn.parallel import data_parallel as data_parallel
from tessel.nn.parallel import gather_batch as gather_batch
from tessel.nn.parallel import random_stream as random_stream
from tessel.nn.parallel import (
    register_ddp_parameters_to_ignore as register_ddp_parameters_to_ignore,
)
from tessel.nn.pooling import DistributedAvgPool1d as DistributedAvgPool1d
from tessel.nn.pooling import DistributedAvgPool2d as DistributedAvgPool2d
from tessel.nn.pooling import DistributedAvgPool3d as DistributedAvgPool3d
from tessel.nn.pooling import DistributedMaxPool1d as DistributedMaxPool1d
from tessel.nn.pooling import DistributedMaxPool2d as DistributedMaxPool2d
from tessel.nn.pooling import DistributedMaxPool3d as DistributedMaxPool3d
from tessel.nn.pooling import DistributedPoolingBase as DistributedPoolingBase
from tessel.nn.region import HaloRegion as HaloRegion
from tessel.nn.upsample import DistributedUpsample as DistributedUpsample
from tessel.nn.upsample import DistributedUpsamplingBilinear2d as DistributedUpsamplingBilinear2d
from tessel.nn.upsample import DistributedUpsamplingNearest2d as DistributedUpsamplingNearest2d
from tessel.primitives.all_gather import AllGather as AllGather
from tessel.primitives.all_gather import ReduceScatter as ReduceScatter
from tessel.primitives.all_sum_reduce import AllSumReduce as AllSumReduce
from tessel.primitives.broadcast import Broadcast as Broadcast
from tessel.primitives.broadcast import SumReduce as SumReduce
from tessel.primitives.halo_exchange import HaloExchange as HaloExchange
from tessel.primitives.repartition import Repartition as Repartition

if _TYPE_CHECKING:  # from a higher layer: `tessel` adds these names here
    from tessel.state import ParallelGradScaler as ParallelGradScaler
    from tessel.state import clip_grad_norm_ as clip_grad_norm_
    from tessel.state import collect_optimizer_state_dict as collect_optimizer_state_dict
    from tessel.state import collect_state_dict as collect_state_dict
    from tessel.state import load_weights as load_weights
    from tessel.state import relocate_optimizer_state_dict as relocate_optimizer_state_dict
    from tessel.state import relocate_state_dict as relocate_state_dict
    from tessel.state import save_weights as save_weights
