"""Strategies: how an image is split into patches for a prior, and reassembled.

It may import `core` only.
"""

from tessel.imaging.distribution_strategies.strategies import BasicStrategy as BasicStrategy
from tessel.imaging.distribution_strategies.strategies import (
    DistributedSignalStrategy as DistributedSignalStrategy,
)
from tessel.imaging.distribution_strategies.strategies import (
    SmartTilingStrategy as SmartTilingStrategy,
)
from tessel.imaging.distribution_strategies.strategies import create_strategy as create_strategy
