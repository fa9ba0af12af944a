"""The kernel: where values are stored (`Layout`), and the linear operator that moves them (`Move`).

From the bottom: `boxes` and `windows` are integers only, `partition` and `layout` define which
worker holds what, `plan` computes the pieces of a movement, and `linop` and `move` make it an
operator with an adjoint; `halo` is the other movement. It may import `transport`.

The names below are what packages above build on: layouts and movements, the agreement that comes
before a movement (`agree`, `tell`), shared values and their copies (`replicate`, `total`), and what
a window reads. `imaging` imports nothing else of the kernel.
"""

from tessel.core import boxes as boxes
from tessel.core.agreement import Agreement as Agreement
from tessel.core.agreement import Signature as Signature
from tessel.core.agreement import TensorMeta as TensorMeta
from tessel.core.agreement import agree as agree
from tessel.core.agreement import grad_alike as grad_alike
from tessel.core.agreement import same as same
from tessel.core.agreement import tell as tell
from tessel.core.boxes import Box as Box
from tessel.core.boxes import Interval as Interval
from tessel.core.boxes import Region as Region
from tessel.core.checksum import checksum_of as checksum_of
from tessel.core.context import in_forward_mode as in_forward_mode
from tessel.core.context import is_compiling as is_compiling
from tessel.core.context import setting as setting
from tessel.core.layout import Cut as Cut
from tessel.core.layout import Layout as Layout
from tessel.core.layout import Shape as Shape
from tessel.core.linop import LinearOperator as LinearOperator
from tessel.core.linop import operator_of as operator_of
from tessel.core.move import Move as Move
from tessel.core.partition import Partition as Partition
from tessel.core.partition import world as world
from tessel.core.shared import Replicate as Replicate
from tessel.core.shared import anchored_zeros as anchored_zeros
from tessel.core.shared import copying as copying
from tessel.core.shared import replicate as replicate
from tessel.core.shared import shared_whole as shared_whole
from tessel.core.shared import total as total
from tessel.core.windows import Mirrored as Mirrored
from tessel.core.windows import ReceptiveField as ReceptiveField
from tessel.core.windows import Window as Window
from tessel.core.windows import reads as reads
