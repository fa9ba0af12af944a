"""Checks of operators and of converted models, and local workers to run them on.

It may import `nn`, `launch` and packages below them.
"""

from tessel.tensor.comparing import check_calls as check_calls
from tessel.testing.checks import check_adjoint as check_adjoint
from tessel.testing.checks import check_gradient as check_gradient
from tessel.testing.checks import random_in as random_in
from tessel.testing.memory import count_memory as count_memory
from tessel.testing.model import ModelReport as ModelReport
from tessel.testing.model import check_model as check_model
from tessel.testing.pool import WorkerPool as WorkerPool
from tessel.testing.traffic import count_traffic as count_traffic
