"""The image in parts: operators with halos, operators that gather it, and their building blocks.

It may import `imaging.context`, `imaging.parameters` and `imaging.problems`, and what `imaging`
may.
"""

from tessel.imaging.parts.layouts import operator_grid as operator_grid
from tessel.imaging.parts.local_rules import partition_physics as partition_physics
from tessel.imaging.parts.operators import Chain as Chain
from tessel.imaging.parts.operators import Convolution as Convolution
from tessel.imaging.parts.operators import Decimation as Decimation
from tessel.imaging.parts.operators import Differences as Differences
from tessel.imaging.parts.operators import Mask as Mask
from tessel.imaging.parts.operators import PartOperator as PartOperator
from tessel.imaging.parts.operators import Whole as Whole
