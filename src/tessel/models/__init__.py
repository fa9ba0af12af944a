"""Models: whole networks on spread tensors, built from operators.

It may import `nn`, `operators` and packages below them.
"""

from tessel.models.fno import FNO as FNO
