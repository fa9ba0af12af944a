"""Models: whole networks on spread tensors, built from operators.

It may import `state` and packages below it.
"""

from tessel.models.fno import FNO as FNO
