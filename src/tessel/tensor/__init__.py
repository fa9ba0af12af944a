"""The spread tensor, and the table that defines what torch's functions do with it.

It may import `operators` (for transforms), `primitives`, `core` and `transport`. Packages above use
`periodic_halo`, which continues a tensor periodically, and `seeded`, which seeds torch's generators
temporarily, too.
"""

from tessel.tensor import call as _call  # noqa: F401  (torch's functions are called through it)
from tessel.tensor import comparing as _comparing  # noqa: F401  (it reads TESSEL_CHECK)
from tessel.tensor.create import arange as arange
from tessel.tensor.create import empty as empty
from tessel.tensor.create import from_local as from_local
from tessel.tensor.create import full as full
from tessel.tensor.create import linspace as linspace
from tessel.tensor.create import ones as ones
from tessel.tensor.create import rand as rand
from tessel.tensor.create import randint as randint
from tessel.tensor.create import randn as randn
from tessel.tensor.create import spread as spread
from tessel.tensor.create import zeros as zeros
from tessel.tensor.explanation import explain as explain
from tessel.tensor.gathering import GatherWarning as GatherWarning
from tessel.tensor.gathering import fallback as fallback
from tessel.tensor.padding import periodic_halo as periodic_halo
from tessel.tensor.reproducible_sum import sum as sum
from tessel.tensor.shared_random import seeded as seeded
from tessel.tensor.table import UnsupportedError as UnsupportedError
from tessel.tensor.tensor import Tensor as Tensor
