"""Solvers: iterative methods on images that are whole on every worker or in parts.

A method defines one iteration; `solve` iterates it, with criteria, a history, a progress bar and
checkpoints. Methods call `grad` and `prox` of data fidelities and priors, and `A` and `A_adjoint`
of physics, on local tensors; inner products are those of the layout. It may import
`imaging.signal`, `imaging.parameters`, `imaging.parts` and what `imaging` may.
"""

from tessel.imaging.solvers.checkpoint import Checkpoint as Checkpoint
from tessel.imaging.solvers.iteration import Solution as Solution
from tessel.imaging.solvers.iteration import solve as solve
from tessel.imaging.solvers.linear import CG as CG
from tessel.imaging.solvers.linear import CGLS as CGLS
from tessel.imaging.solvers.linear import lipschitz as lipschitz
from tessel.imaging.solvers.linear import power_iteration as power_iteration
from tessel.imaging.solvers.method import PSNR as PSNR
from tessel.imaging.solvers.method import Below as Below
from tessel.imaging.solvers.method import History as History
from tessel.imaging.solvers.method import Method as Method
from tessel.imaging.solvers.method import Plateau as Plateau
from tessel.imaging.solvers.method import RelativeChange as RelativeChange
from tessel.imaging.solvers.method import Space as Space
from tessel.imaging.solvers.method import TimeLimit as TimeLimit
from tessel.imaging.solvers.proximal import FISTA as FISTA
from tessel.imaging.solvers.proximal import ISTA as ISTA
from tessel.imaging.solvers.proximal import PGD as PGD
from tessel.imaging.solvers.proximal import RED as RED
from tessel.imaging.solvers.proximal import GradientDescent as GradientDescent
from tessel.imaging.solvers.splitting import ADMM as ADMM
from tessel.imaging.solvers.splitting import HQS as HQS
from tessel.imaging.solvers.splitting import ChambollePock as ChambollePock
from tessel.imaging.solvers.splitting import CondatVu as CondatVu
from tessel.imaging.solvers.splitting import differences as differences
from tessel.imaging.solvers.splitting import fidelity_prox as fidelity_prox
from tessel.imaging.solvers.splitting import total_variation as total_variation
