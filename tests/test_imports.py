"""The layers of the code: imports go downwards, and each thing is done in one place."""

from __future__ import annotations

import ast
import gc
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import tessel

SOURCE = Path(__file__).parents[1] / "src" / "tessel"
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = (  # from the top; a module imports only what stands below it, or in its own package
    ("__main__",),
    ("cli",),
    ("examples",),
    ("viz",),
    ("imaging",),
    ("interop",),
    ("testing",),
    ("tracing",),
    ("data",),
    ("models",),
    ("state",),
    ("nn",),
    ("distributed",),
    ("tensor",),
    ("operators",),
    ("primitives",),
    ("core",),  # the package itself: what others import of the kernel's modules
    ("core.halo", "core.shared"),
    ("core.move",),
    ("core.hierarchy",),
    ("core.plan",),
    ("core.linop",),
    ("core.checksum",),
    ("core.agreement",),
    ("core.layout",),
    ("core.partition",),
    ("core.graph",),
    ("transport", "launch"),
    ("joining",),
    ("core.windows",),
    ("core.numbers", "core.memory_format"),
    (
        *("core.boxes", "core.context", "core.handles"),
        *("encoding", "endings", "errors", "garbage", "limits", "machine", "version"),
    ),
    ("settings",),
)
HEIGHT = {name: -level for level, names in enumerate(LAYERS) for name in names}

COMMUNICATION = {
    *("broadcast", "reduce", "all_reduce", "gather", "all_gather", "all_gather_into_tensor"),
    *("scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp", "barrier"),
    *("monitored_barrier", "all_gather_object", "gather_object", "scatter_object_list"),
    *("broadcast_object_list", "send_object_list", "recv_object_list", "new_group"),
    *("new_subgroups", "new_subgroups_by_enumeration", "split_group"),
    *("_c10d_functional", "_functional_collectives"),
}


def name_of(path: Path) -> str:
    """The name of a module, `tessel.x.y`; of a package, `tessel.x`."""
    parts = ("tessel", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def component(module: str) -> str:
    """The package of a module; of the kernel, whose modules are layers themselves, the module."""
    name, *rest = module.split(".")[1:] or [""]
    return ".".join([name, *rest[:1]]) if name == "core" else name


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """What stands in a file; all of them are half a million, which is slow to walk."""
    return tuple(ast.walk(ast.parse(path.read_text(), str(path))))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """They take hundreds of megabytes, which other tests do not need."""
    gc.disable()  # it would look at all of them, again and again, while they are made
    yield
    nodes.cache_clear()
    gc.enable()


def only_for_type_checkers(path: Path) -> Iterator[ast.AST]:
    """What a file says to type checkers alone, and never executes."""
    for node in nodes(path):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "_TYPE_CHECKING":
            for each in node.body:
                yield from ast.walk(each)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Each module of Tessel that a file imports, wherever in it, and the line."""
    never = {id(node) for node in only_for_type_checkers(path)}
    for node in nodes(path):
        if id(node) in never:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "tessel":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            if node.module == "tessel":
                for alias in node.names:
                    if alias.name != "__version__":  # of the package, which is there before them
                        yield f"tessel.{alias.name}", node.lineno
            elif node.module and node.module.startswith("tessel."):
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    yield module if module in MODULES else node.module, node.lineno


def test_only_nn_has_names_from_above() -> None:
    """Those that documents have there: `tessel` puts them there, and type checkers must know."""
    assert [name for name in MODULES if [*only_for_type_checkers(MODULES[name])]] == ["tessel.nn"]
    for node in only_for_type_checkers(MODULES["tessel.nn"]):
        if isinstance(node, ast.ImportFrom):
            assert node.module == "tessel.state"
            for alias in node.names:
                assert getattr(tessel.nn, alias.name) is getattr(tessel.state, alias.name)


def test_imports_go_downwards() -> None:
    wrong = []
    for module, path in MODULES.items():
        if module == "tessel":
            continue
        own = component(module)
        assert own in HEIGHT, f"{module} is in no layer"
        for imported, line in imports(path):
            other = component(imported)
            if other != own and not (other in HEIGHT and HEIGHT[other] < HEIGHT[own]):
                wrong.append(f"{path}:{line}: {own} must not import {imported}")
    assert not wrong, "\n".join(wrong)


def test_imaging_stands_on_what_packages_export() -> None:
    """It takes names of other packages from these, as a user can, and from no module in them."""
    wrong = []
    for module in (name for name in MODULES if component(name) == "imaging"):
        for node in nodes(MODULES[module]):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            else:
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in named:
                is_other = name.startswith("tessel.") and component(name).split(".")[0] != "imaging"
                if is_other and name.count(".") > 1:
                    wrong.append(f"{MODULES[module]}:{node.lineno}: {name} is inside of a package")
    assert not wrong, "\n".join(wrong)


def test_imaging_imports_what_the_reference_lists() -> None:
    """For its users, or in the section for authors of packages, which lists nothing else."""
    page = (SOURCE.parents[1] / "docs" / "reference.md").read_text()
    public = {*re.findall(r"^::: tessel\.(\w+)$", page, re.MULTILINE)}
    section = page.partition("## For authors of packages\n")[2].partition("\n## ")[0]
    listed: set[tuple[str, str]] = set()
    for table in section.split("\n| from ")[1:]:
        head, *rows = table.splitlines()
        names = {name for row in rows for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
        homes = {name: re.findall(r"`(tessel\.\w+)`", head) for name in names}
        for name, packages in homes.items():
            (home,) = [each for each in packages if hasattr(importlib.import_module(each), name)]
            listed.add((home, name))
    arithmetic = {
        *re.findall(r"`(\w+)`", section.partition("| split arithmetic: ")[2].split(";")[0])
    }
    found: set[tuple[str, str]] = set()
    for path in (MODULES[name] for name in MODULES if component(name) == "imaging"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tessel."):
                if component(str(node.module)) != "imaging":
                    found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "transport":
                    found.add(("tessel.transport", node.attr))
                assert node.value.id != "boxes" or node.attr in arithmetic, node.attr
    missing = found - listed
    assert {name for _, name in missing} <= public, missing
    assert listed <= found, "imaging does without"


def test_workers_agree_in_one_module() -> None:
    """What others say before data is sent is compared in `core/agreement.py`, for all of Tessel."""
    # clocks are told, and nothing is compared; a trace looks at what is
    allowed = {"tessel.core.agreement": {"share_words", "check_same_call"}}
    allowed["tessel.tracing.clocks"] = {"share_words"}
    wrong = [
        f"{path}:{node.lineno}: {node.attr}; use agree, agree_on_call or an Agreement"
        for module, path in MODULES.items()
        if component(module) != "transport"
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("share_words", "check_same_call")
        if node.attr not in allowed.get(module, ())
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        module: {name for name, _ in imports(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def attributes(path: Path) -> Iterator[tuple[str, int]]:
    """The names that a file takes from torch.distributed to communicate, however it imports it."""
    aliases = {"torch.distributed"}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            aliases |= {
                alias.asname or alias.name
                for alias in node.names
                if alias.name == "torch.distributed"
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "torch.distributed._functional"
        ):
            yield "_functional_collectives", node.lineno
    for node in nodes(path):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in COMMUNICATION
            and (node.attr == "_c10d_functional" or ast.unparse(node.value) in aliases)
        ):
            yield node.attr, node.lineno


def test_only_transport_communicates() -> None:
    found = [
        (path, line, name)
        for path in FILES
        for name, line in attributes(path)
        if name in COMMUNICATION
    ]
    wrong = [each for each in found if component(name_of(each[0])) != "transport"]
    assert not wrong, wrong
    seen = {name for _, _, name in found}
    assert {"isend", "irecv", "all_to_all_single", "new_group"} <= seen, "of the transport"


def descendants(kind: type) -> set[type]:
    return {kind}.union(*map(descendants, kind.__subclasses__()))


def test_one_autograd_function() -> None:
    """One descendant of `torch.autograd.Function`; its own descendants stand beside it."""
    for name in MODULES:
        if component(name) not in ("__main__", "examples"):
            importlib.import_module(name)
    found = {
        kind
        for kind in descendants(torch.autograd.Function)
        if kind.__module__.partition(".")[0] == "tessel"
    }
    assert {(kind.__module__, kind.__name__) for kind in found} == {
        ("tessel.core.linop", name)
        for name in ("_Apply", "_ApplyAnyMode", "_ApplyProduct", "_ApplySeveral", "_ApplyMap")
    }
    assert [kind.__name__ for kind in found if torch.autograd.Function in kind.__bases__] == [
        "_Apply"
    ]


def names_of_derivatives(node: ast.FunctionDef) -> set[str]:
    """Of which of torch's operators for derivatives a function of `tensor/aten.py` is the rule."""
    entered = [each for each in node.decorator_list if isinstance(each, ast.Call)]
    given = [name.value for each in entered for name in each.args if isinstance(name, ast.Constant)]
    return {str(name) for name in given if "_backward" in str(name)}


def computes_with(name: str, node: ast.FunctionDef) -> bool:
    """Whether a function does more with an argument than to pull it back, or look at its kind."""
    others = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and ast.unparse(each.func) in ("pulled_back", "held_layouts"):
            others |= {id(argument) for argument in each.args}
        elif isinstance(each, ast.Attribute) and each.attr in ("shape", "dtype", "device"):
            others.add(id(each.value))
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == name)
    return any(id(each) not in others for each in names)


def test_gradients_that_are_no_adjoints() -> None:
    """Those that docs/architecture.md names: gradients that are written out, and hooks."""
    gradients, hooks, formulas, kernels = set(), set(), set(), set()
    for path in FILES:
        file = str(path.relative_to(SOURCE))
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef) and names_of_derivatives(node):
                assert file == "tensor/aten.py"
                if computes_with(node.args.args[0].arg, node):
                    formulas |= names_of_derivatives(node)
            if isinstance(node, ast.Attribute) and re.search(
                r"aten\.\w*backward", ast.unparse(node)
            ):
                kernels.add(file)
            if isinstance(node, ast.FunctionDef) and node.name in ("backward", "vjp"):
                gradients.add((file, node.name))
            called = node.func if isinstance(node, ast.Call) else None
            if called is not None and re.search(r"\bregister_\w*hook$", ast.unparse(called)):
                hooks.add(file)
    # the only attachment to autograd; a method of spread tensors; the method of a user's physics
    gradients -= {
        *(("core/linop.py", name) for name in ("backward", "vjp")),
        ("tensor/attributes.py", "backward"),
        ("imaging/parts/operators.py", "vjp"),
    }
    hooks -= {"tensor/attributes.py"}  # hooks of spread tensors, which their user registers
    files = {
        *("tensor/overlapped_linear.py", "tensor/tensor.py", "tensor/block_sum.py"),
        *("tensor/blockwise_attention.py", "tensor/batch_norm.py", "tensor/group_norm.py"),
        "tensor/small_volumes.py",
    }
    assert gradients == {(file, "vjp") for file in files}
    assert formulas == {
        *("select_backward", "slice_backward", "native_layer_norm_backward"),
        *("_softmax_backward_data", "_log_softmax_backward_data", "convolution_backward"),
    }
    assert kernels == {  # torch's own
        *("tensor/batch_norm.py", "tensor/blockwise_attention.py", "tensor/small_volumes.py"),
    }
    gradients_change = {"imaging/distributing.py", "nn/parallel/replicas.py"}
    assert hooks == gradients_change | {
        *("distributed/shards.py", "tracing/recorder.py"),
        "tensor/tensor.py",
        *("testing/model/runs.py", "cli/plan_model.py"),
    }
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    page = page[page.index("### What is not an adjoint") : page.index("## Layers")]
    shown = {*files, *hooks, *formulas, *kernels, "tensor/aten.py"}
    assert [each for each in sorted(shown) if f"`{each}`" not in page] == []


def test_splits_are_computed_in_boxes() -> None:
    """A second `divmod` or `%` by a number of parts is where two splits begin to differ."""
    found = {
        path.name
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "divmod"
    }
    assert found == {"boxes.py"}


def test_no_error_is_swallowed() -> None:
    """`except Exception` hides what it does not know; where it must be, its line says why."""
    wrong = []
    for path in FILES:
        lines = path.read_text().splitlines()
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                if caught in ("everything", "Exception") and "#" not in lines[node.lineno - 1]:
                    wrong.append(f"{path}:{node.lineno}")
    assert not wrong, wrong


def test_no_statement_only_reads_an_attribute() -> None:
    """Which would be for what reading it does besides."""
    wrong = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Attribute)
    ]
    assert not wrong, wrong


def test_reading_makes_no_group() -> None:
    """Constructors and functions do so, which all workers call: not a property."""
    wrong = [
        f"{path}:{node.lineno}: {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).endswith("property") for each in node.decorator_list)
        for called in ast.walk(node)
        if isinstance(called, ast.Call)
        and ast.unparse(called.func).rpartition(".")[2] in ("prepare", "group_of")
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["boxes", "layout", "linop", "move", "partition", "windows"])
def test_modules_of_the_kernel_have_their_former_names(name: str) -> None:
    """The same modules: a class that was saved under its former name is the class of today."""
    former = importlib.import_module(f"tessel.{name}")
    assert former is importlib.import_module(f"tessel.core.{name}")


def test_no_banners() -> None:
    """A comment says why; what a file is divided into is said by its names."""
    banner = re.compile(r"^\s*# ?--", re.MULTILINE)
    assert [str(path) for path in FILES if banner.search(path.read_text())] == []


def test_no_module_loses_the_builtin_slice() -> None:
    bound = [
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if (isinstance(node, ast.Name) and node.id == "slice" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == "slice")
        or (isinstance(node, ast.alias) and (node.asname or node.name) == "slice")
        or (isinstance(node, ast.arg) and node.arg == "slice")
    ]
    assert bound == ["tessel"]


ALONE = """
import sys
import numpy, rich.console, torch, torch._dynamo, torch.distributed

for name in ("matplotlib", "pytest", "hypothesis", "scipy", "pandas", "typer", "mpi4py"):
    for known in [known for known in sys.modules if known.partition(".")[0] == name]:
        del sys.modules[known]
    sys.modules[name] = None  # as if it were not installed
known = {name.partition(".")[0] for name in sys.modules}
import tessel, tessel.cli, tessel.viz
new = {name.partition(".")[0] for name in sys.modules} - known - sys.stdlib_module_names
assert new == {"tessel"}, new
assert not torch.distributed.is_initialized()
assert tessel.world().size == 1
y = tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(2))
assert torch.equal(y, torch.ones(2))
"""
QUICK = """
import sys, time
import numpy, torch, torch.distributed

begin = time.process_time()
import tessel
print(time.process_time() - begin)
assert "torch._dynamo" not in sys.modules, "the compiler is imported before it is needed"
assert "matplotlib" not in sys.modules
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_the_core_needs_torch_numpy_and_rich_alone() -> None:
    done = python(ALONE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_import_is_quick() -> None:
    """Beside torch's own, which takes seconds, it is not felt."""
    done = python(QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout) < 1.0  # of this process's own time: 0.1 s


def test_public_names() -> None:
    """What the package promises is there."""
    import tessel

    names = (
        *("world", "Partition", "Layout", "Move", "LinearOperator", "zero_volume_tensor"),
        *("scatter", "gather", "all_gather", "launch", "WorkerLost", "nn", "testing"),
    )
    assert [name for name in names if not hasattr(tessel, name)] == []
    layers = ("Broadcast", "SumReduce", "AllSumReduce", "AllGather", "ReduceScatter")
    for name in (*layers, "Repartition", "HaloExchange"):
        assert getattr(tessel.nn, name).__doc__
    for name in ("check_adjoint", "check_gradient", "count_traffic", "WorkerPool"):
        assert getattr(tessel.testing, name).__doc__


def test_tests_mirror_the_tree() -> None:
    """Each package has a folder of tests, and a test file has a name of its own."""
    tests = Path(__file__).parent
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages <= {path.name for path in tests.iterdir() if path.is_dir()}
    names = [path.name for path in tests.rglob("*.py")]
    assert len(names) == len(set(names)), "workers import a test file by its name alone"


def test_each_module_is_named_by_a_test_file() -> None:
    """By its name, or by a sentence of its docstring: "Tests `core/move.py`, `core/plan.py`."."""
    tests = Path(__file__).parent
    stems = {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")}
    named = set()
    for path in tests.rglob("*.py"):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        for sentence in re.findall(r"^Tests (`.*?)\.$", said, re.DOTALL | re.MULTILINE):
            named |= {*re.findall(r"`(\S+)`", sentence)}
    modules = {
        str(path.relative_to(SOURCE)): path.stem
        for module, path in MODULES.items()
        if path.name not in ("__init__.py", "__main__.py") and component(module) != "examples"
    }
    assert sorted(named - {*modules}) == [], "there are no such modules"
    assert [f for f, stem in modules.items() if stem not in stems and f not in named] == []


def test_a_test_file_has_the_name_of_what_it_tests() -> None:
    """Of a module or a package; the docstring of any other says which modules it tests."""
    tests = Path(__file__).parent
    unnamed = []
    for package in sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").exists()):
        if package.name == "examples":  # its tests run what is in examples/
            continue
        for path in sorted((tests / package.name).rglob("test_*.py")):
            folder = SOURCE / path.parent.relative_to(tests)
            name = path.stem.removeprefix("test_")
            if (folder / f"{name}.py").exists() or (folder / name).is_dir() or name == folder.name:
                continue
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            if not re.search(r"^Tests `", said, re.MULTILINE):
                unnamed.append(str(path.relative_to(tests)))
    assert unnamed == []


def aliases(path: Path) -> Iterator[str]:
    """The names like those of classes, as `Shape`, that a module itself gives to something."""
    for node in ast.parse(path.read_text()).body:
        named = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in named:
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z]+[a-z]\w*", target.id):
                yield target.id


def test_a_class_or_an_alias_has_a_name_of_its_own() -> None:
    """Also of those that are private: a reader who looks for one finds one."""
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if component(module) == "examples":  # programs of their own
            continue
        classes = [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]
        for name in (*classes, *aliases(path)):
            homes.setdefault(name.lstrip("_"), []).append(module)
    assert {"Shape", "Plan", "Rule", "RowExchange"} <= {*homes}, "aliases and classes are seen"
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_packages_say_what_they_may_import() -> None:
    for path in SOURCE.rglob("__init__.py"):
        if path.parent.name != "examples":
            assert "may import" in (ast.get_docstring(ast.parse(path.read_text())) or ""), path


def test_no_name_hides_a_module() -> None:
    """`tessel.a.b` is the module if there is one, whatever has been imported."""
    hidden = []
    for path in FILES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not parts or parts[0] in ("__main__", "examples"):
            continue
        name = ".".join(("tessel", *parts))
        module = importlib.import_module(name)
        parent = importlib.import_module(name.rpartition(".")[0])
        if getattr(parent, parts[-1], module) is not module:
            hidden.append(name)
    # The function of the documents has the name of its package, whose names come by `from`.
    assert hidden == ["tessel.launch"]
