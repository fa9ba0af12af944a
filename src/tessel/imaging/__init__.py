"""Imaging: large inverse problems, with operators, measurements and the image over workers.

It may import all packages but `cli`, `viz` and `examples`, and only what they export; only these
import it.
"""

from tessel.imaging import solvers as solvers
from tessel.imaging.context import DistributedContext as DistributedContext
from tessel.imaging.distributing import distribute as distribute
from tessel.imaging.distribution_strategies.strategies import (
    DistributedSignalStrategy as DistributedSignalStrategy,
)
from tessel.imaging.factory import Bundle as Bundle
from tessel.imaging.factory import FactoryConfig as FactoryConfig
from tessel.imaging.factory import TilingConfig as TilingConfig
from tessel.imaging.factory import make_distrib_bundle as make_distrib_bundle
from tessel.imaging.fidelity import DistributedDataFidelity as DistributedDataFidelity
from tessel.imaging.linear_physics import DistributedLinearPhysics as DistributedLinearPhysics
from tessel.imaging.measurements import DistributedMeasurements as DistributedMeasurements
from tessel.imaging.physics import DistributedPhysics as DistributedPhysics
from tessel.imaging.prior import DistributedPrior as DistributedPrior
from tessel.imaging.prior import DistributedProcessing as DistributedProcessing
from tessel.imaging.signal import DistributedSignal as DistributedSignal
from tessel.imaging.stacked import DistributedStackedFidelity as DistributedStackedFidelity
from tessel.imaging.stacked import (
    DistributedStackedLinearPhysics as DistributedStackedLinearPhysics,
)
from tessel.imaging.stacked import DistributedStackedPhysics as DistributedStackedPhysics
