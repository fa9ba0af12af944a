"""Proofs for operators, and a local world to run them in."""

from tessel.testing.checks import check_adjoint as check_adjoint
from tessel.testing.checks import check_gradient as check_gradient
from tessel.testing.checks import count_traffic as count_traffic
from tessel.testing.checks import random_in as random_in
