"""The compiled parts: optional, so that Tessel installs where there is no compiler, too."""

import runpy
from pathlib import Path

from setuptools import Extension, setup

TRANSPORT, TENSOR = Path("src/tessel/transport"), Path("src/tessel/tensor")
HEADERS = Path("build/headers")
# a loop over a few instructions that crosses a cache line is an eighth slower
OPTIONS = ["-O3", "-std=gnu11", "-fno-strict-aliasing", "-Wall", "-falign-loops=32"]


def write_header() -> None:
    """The constants that the engine shares with Python, in C."""
    constants = runpy.run_path(str(TRANSPORT / "constants.py"))
    HEADERS.mkdir(parents=True, exist_ok=True)
    text = (f"enum {{ {name} = {constants[name]} }};\n" for name in constants if name.isupper())
    (HEADERS / "constants.h").write_text("".join(text))


write_header()
setup(
    ext_modules=[
        Extension(
            "tessel.transport.engine",
            [str(TRANSPORT / "engine.c")],
            include_dirs=[str(HEADERS)],
            depends=[str(TRANSPORT / "constants.py")],
            extra_compile_args=OPTIONS,
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "tessel.tensor.loops",
            [str(TENSOR / "loops.c")],
            depends=[str(TENSOR / "moments.h")],
            extra_compile_args=OPTIONS,
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
