"""What tests of compiled code need.

To measure how long guards take, Dynamo flushes the caches of the processor after each compilation:
a sixth of the time of these tests. It is a number for its log, which nobody reads here.
"""

from __future__ import annotations

import shutil

import pytest
from torch._dynamo import guards

guards.profile_guard_manager = lambda *arguments: 0.0

SECONDS = 100  # a first compilation imports much
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
