"""TESSEL_TEST_NO_SKIPS: tests that must run where all that they need is meant to be installed.

A pattern; a test of whose name it matches a part fails where it would be skipped, and so does a
file that is skipped as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

VARIABLE = "TESSEL_TEST_NO_SKIPS"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _refused((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _refused((yield))


def _refused(report: Any) -> Any:
    """The same report, failed if the test was skipped and had to run."""
    pattern = os.environ.get(VARIABLE)
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if pattern and is_skip and re.search(pattern, report.nodeid):
        _, _, reason = report.longrepr  # the file, the line
        report.outcome = "failed"
        report.longrepr = f"{reason}\n{VARIABLE}={pattern} says that it must run"
    return report
