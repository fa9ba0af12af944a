"""Operators: the algebra of linear maps on tensors, and their distribution over workers.

It may import `core` and `transport`: layouts, moves, agreement and shared values.
"""

from tessel.operators.algebra import ParOperator as ParOperator
from tessel.operators.algebra import kron as kron
from tessel.operators.choose import Choice as Choice
from tessel.operators.choose import best_partition as best_partition
from tessel.operators.dct import ParDCT as ParDCT
from tessel.operators.dct import ParDST as ParDST
from tessel.operators.dft import ParDFT as ParDFT
from tessel.operators.distributed import Distributed as Distributed
from tessel.operators.distributed import ParRepartition as ParRepartition
from tessel.operators.distributed import distribute as distribute
from tessel.operators.explanation import Explanation as Explanation
from tessel.operators.explanation import explain as explain
from tessel.operators.input_shape import vec as vec
from tessel.operators.layouts import ANYWHERE as ANYWHERE
from tessel.operators.matrices import ParDiagonal as ParDiagonal
from tessel.operators.matrices import ParIdentity as ParIdentity
from tessel.operators.matrices import ParMatrix as ParMatrix
from tessel.operators.matrices import ParMultilinear as ParMultilinear
from tessel.operators.parameters import Parameters as Parameters
from tessel.operators.parameters import gradient as gradient
from tessel.operators.parameters import init as init
from tessel.operators.rates import Machine as Machine
from tessel.operators.reduce import ParReduce as ParReduce
from tessel.operators.restriction import ParRestriction as ParRestriction
