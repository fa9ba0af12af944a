"""The examples in docstrings run, in a world of one."""

import doctest
import importlib
import inspect
import linecache
import pkgutil

import pytest

import tessel

SUBMODULES = [info.name for info in pkgutil.walk_packages(tessel.__path__, prefix="tessel.")]


@pytest.mark.parametrize("name", ["tessel", *SUBMODULES])
def test_examples_of(name, capsys):
    module = importlib.import_module(name)
    # For each docstring, doctest's debugger looks whether one of the files in this cache has
    # changed: of torch's alone these are hundreds, and half of the time of this file.
    linecache.clearcache()
    result = doctest.testmod(module, verbose=False)
    assert result.failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("module", [tessel, tessel.nn, tessel.testing], ids=lambda m: m.__name__)
def test_everything_public_has_an_example(module):
    for name, value in vars(module).items():
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        if name.startswith("_") or inspect.ismodule(value) or is_error:
            continue
        assert ">>> " in (inspect.getdoc(value) or ""), f"{module.__name__}.{name} has no example"
