"""Models: whole networks over tensors that are spread over workers, made of operators.

It may import `nn`, `operators` and what is below them.
"""

from tessel.models.fno import FNO as FNO
