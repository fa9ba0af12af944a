"""Data in parts: each worker reads its box of a sample, and writes its box of a tensor.

It may import `state`, which reads and writes checkpoints of `torch.distributed.checkpoint`, and
packages below it. zarr and h5py are imported when one of their files is opened.
"""

from tessel.data.dataset import PartDataset as PartDataset
from tessel.data.dataset import SamplePart as SamplePart
from tessel.data.files import load as load
from tessel.data.files import save as save
from tessel.data.loader import PartLoader as PartLoader
from tessel.data.sampler import PartSampler as PartSampler
from tessel.data.sources import FromArray as FromArray
from tessel.data.sources import FromArrays as FromArrays
from tessel.data.sources import FromFunction as FromFunction
from tessel.data.sources import Source as Source
