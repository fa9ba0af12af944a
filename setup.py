"""The compiled part: optional, so that Tessel installs where there is no compiler, too."""

import runpy
from pathlib import Path

from setuptools import Extension, setup

TRANSPORT = Path("src/tessel/transport")
HEADERS = Path("build/headers")


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
            # a loop over a few instructions that crosses a cache line is an eighth slower
            extra_compile_args=[
                *("-O3", "-std=gnu11", "-fno-strict-aliasing", "-Wall", "-falign-loops=32"),
            ],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
