"""The compiled part: optional, so that Tessel installs where there is no compiler, too."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tessel.transport.engine",
            ["src/tessel/transport/engine.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-fno-strict-aliasing", "-Wall"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
