"""Models: whole networks over tensors that are spread over workers."""

from tessel.models.fno import FNO as FNO
