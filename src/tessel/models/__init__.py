"""Models: whole networks over tensors that are spread over workers, made of operators."""

from tessel.models.fno import FNO as FNO
