"""Scripts as main programs on the workers of the pool.

To start processes costs seconds for each, most of which is the import of torch. A test that is
about what a script computes and prints, and not about how it is started, runs it here.
"""

import contextlib
import io
import os
import runpy
import sys


def main_program(folder: str, *arguments: str) -> str:
    """What a script prints on this worker, in a folder; the first argument is its name."""
    before = os.getcwd(), sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = list(arguments), [folder]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1:]
    return output.getvalue()
