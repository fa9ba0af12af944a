"""What tests of compiled code need."""

from __future__ import annotations

import shutil

import pytest

SECONDS = 100  # a first compilation imports much
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
