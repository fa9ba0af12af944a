"""What a program notices of Tessel before it uses it: `import tessel` leaves all others alone.

Tests `garbage.py`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD
from torch.optim.optimizer import Optimizer

import tessel
from tessel.garbage import collected_later
from tessel.nn import ParallelLinear

Run = Callable[..., list[Any]]

# where torch asks libraries to say what is theirs: an operator of the name tessel::apply, and the
# function that makes a shard from a file, without which `torch.load` refuses the file
REGISTERED = {
    ("torch._library.custom_ops", "OPDEF_TO_LIB"),
    ("torch._weights_only_unpickler", "_marked_safe_globals_set"),
    ("torch.library", "_defs"),
    ("torch.library", "_impls"),
    ("torch.ops", "_dir"),
    ("torch.ops", "tessel"),
    ("torch.jit._builtins", "_builtin_table"),  # torch fills it when somebody first asks
}
COMPARE = """
import importlib, os, random, signal, sys, threading, warnings
import numpy, torch

warnings.simplefilter("ignore")
for name in sys.argv[1:]:  # what others change when they are imported is not ours
    try:
        importlib.import_module(name)
    except Exception:
        pass

def members(value):
    if isinstance(value, dict):
        return {k if isinstance(k, (str, int)) else id(k): id(v) for k, v in list(value.items())}
    if isinstance(value, (list, set)):
        return sorted(map(id, value))
    return None

def seen():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch":
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = id(value), members(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, inner in list(vars(value).items()):
                    found[name, key, attribute] = id(inner), members(inner)
    return found

def rest():
    return {
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(each) for each in signal.valid_signals()],
        "environment": dict(os.environ),
        "finders": (list(sys.meta_path), list(sys.path_hooks)),
        "hooks": (sys.excepthook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "threads": threading.enumerate(),
        "generators": (torch.get_rng_state().tolist(), random.getstate()),
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
    }

def safe():  # by what `torch.load` makes values
    return {each.__module__ for each in torch.serialization.get_safe_globals()}

torch_before, before, safe_before = seen(), rest(), safe()
import tessel
after = rest()
changed = [(key,) for key in before if before[key] != after[key]]
changed += [key for key, value in seen().items()
            if torch_before.get(key) != value
            and (key in torch_before or (key[0], "__name__") in torch_before)]
print((changed, safe() - safe_before))
"""


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_import_changes_nothing_outside() -> None:
    loaded = "import sys, tessel; print(*(m for m in sys.modules if not m.startswith('tessel')))"
    changed, safe = eval(python(COMPARE, *python(loaded).split()))
    assert [each for each in changed if each not in REGISTERED] == []
    assert safe == {"tessel.distributed.shards"}


@pytest.mark.slow
@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_collected_after_an_import_as_before(was_enabled: bool) -> None:
    kept = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with contextlib.suppress(ImportError), collected_later():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if kept else gc.disable)()


def test_a_comparison_finds_a_hook_and_a_patch() -> None:
    """The test above can fail."""
    patch = (
        "import tessel; import torch.optim.optimizer as o; torch.nn.Linear.forward = print\n"
        "o.register_optimizer_step_pre_hook(print)"
    )
    changed, _ = eval(
        python(COMPARE.replace("import tessel\n", f"{patch}\n"), "torch.optim.optimizer")
    )
    assert ("torch.optim.optimizer", "_global_optimizer_pre_hooks") in changed
    assert ("torch.nn.modules.linear", "Linear", "forward") in changed


SOURCE = Path(tessel.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
OUTSIDE = ("torch", "os", "sys", "signal")  # of which values and functions are not Tessel's
CHANGING = re.compile(
    r"(^|\.)(register\w*|add|append|insert|extend|remove|pop|update|setdefault|define|impl|custom_op"
    r"|add_safe_globals|has_side_effect|filterwarnings|signal|mallopt)$"
)
# by file: what it assigns to, and the functions that it calls to change something
CHANGES = {
    "__init__.py": {"_sys.modules[f'tessel.{_name}']"},
    "cli/forked_job.py": {"os.environ", "signal.signal"},
    "cli/plan_model.py": {"sys.path.insert", "torch.set_default_dtype"},
    "cli/rendezvous.py": {"rendezvous_handler_registry.register"},
    "cli/run.py": {
        *("os.environ['OMP_NUM_THREADS']", "os.environ[TRACE]", "os.environ.setdefault"),
        *("os.environ.pop", "sys.path.insert", "sys.path[:]", "signal.signal"),
    },
    "cli/worker.py": {
        *("sys.argv", "sys.path[0]", "sys.path.insert"),
        *(f"sys.modules['{name}']" for name in ("__main__", "__mp_main__")),
    },
    "core/graph.py": {
        *("torch.library.custom_op", "_library.define", "torch.library.impl"),
        *("torch.library.register_fake", "torch.fx.node.has_side_effect", "SAC_IGNORED_OPS.add"),
    },
    "distributed/shards.py": {"torch.serialization.add_safe_globals"},
    "distributed/wrapping.py": {
        *("wrapper.__init__", "sys.meta_path.insert", "sys.meta_path.remove", "known.append"),
    },
    "imaging/context.py": {"setattr(cudnn)"},
    "imaging/solvers/checkpoint.py": {"torch.set_rng_state"},
    "joining.py": {"dist.distributed_c10d._world.group_count"},
    "launch/environment.py": {
        *("sys.path[:]", "sys.argv[:]", "os.environ.pop", "os.environ[name]"),
        "torch.set_num_threads",
    },
    "launch/forkserver.py": {"signal.signal"},
    "launch/task.py": {f"sys.modules['{name}']" for name in ("__main__", "__mp_main__")},
    "machine.py": {"os.environ.setdefault", "library.mallopt"},
    "nn/convert.py": {"kind.__deepcopy__", "kind.__reduce__"},
    "testing/memory.py": {"_STORAGE.resize_"},
    "tracing/block.py": {"signal.signal", "os.register_at_fork"},
    "tracing/recorder.py": {
        *(f"register_optimizer_step_{when}_hook" for when in ("pre", "post")),
        *(f"modules.register_module_forward_{name}" for name in ("pre_hook", "hook")),
        "warnings.filterwarnings",
    },
    "transport/device_wait.py": {"handle._get_backend(torch.device('cuda'))._set_default_timeout"},
    "transport/world.py": {"os.environ.setdefault", "os.environ[name]"},
}


def root(node: ast.AST) -> str:
    """The name at which an expression begins."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def names_from_outside(tree: ast.Module) -> set[str]:
    """What a file imports from others, and gives a name of its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each for each in node.names if each.name.partition(".")[0] in OUTSIDE]
            found |= {(each.asname or each.name).partition(".")[0] for each in names}
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in OUTSIDE:
                found |= {each.asname or each.name for each in node.names}
    for node in ast.walk(tree):
        # also a loop over what was imported
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            if {root(each) for each in node.iter.elts} & found:
                found |= {root(node.target)}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and root(node.value or node) in found:
            is_plain = isinstance(node.value, ast.Attribute | ast.Name)
            is_made = "torch.library" in ast.unparse(node.value or node)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and (is_plain or is_made):
                    found.add(target.id)
    return found - {""}


def changes(text: str) -> Iterator[str]:
    """What a file changes outside of Tessel, as it is written there."""
    tree = ast.parse(text)
    outside = names_from_outside(tree)
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for each in targets:
            for target in each.elts if isinstance(each, ast.Tuple) else [each]:
                if not isinstance(target, ast.Attribute | ast.Subscript):
                    continue
                # methods of classes, wherever these come from
                is_method = re.search(
                    r"\.__(init|new|call|reduce|deepcopy)\w*$", ast.unparse(target)
                )
                if root(target) in outside or (is_method and root(target) != "self"):
                    yield ast.unparse(target)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("setattr", "delattr") and root(node.args[0]) in outside:
            yield f"{called}({ast.unparse(node.args[0])})"
        is_function = called.startswith("torch.") and called.count(".") == 1  # as torch.add
        is_change = CHANGING.search(called) and not is_function
        is_outside = root(node.func) in outside | {"warnings", "library"}
        is_setting = re.match(r"torch\.set_(num|default|rng)|.*\._set_default", called)
        if is_setting or (is_change and is_outside):
            yield called


def test_what_changes_outside_is_on_the_page() -> None:
    """Assignments to what other libraries own, and calls by which they are told something."""
    found = {
        str(path.relative_to(SOURCE)): {*changes(path.read_text())}
        for path in SOURCE.rglob("*.py")
        if "examples" not in path.parts
    }
    assert {file: each for file, each in found.items() if each} == CHANGES
    page = PAGE.read_text()
    page = page[page.index("## What Tessel changes in torch") : page.index("## Agreement")]
    assert [file for file in CHANGES if f"`{file}`" not in page] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.nn.Linear.forward = print",
        "from torch.nn import Linear as L\nL.forward = print",
        "import torch\nKIND = torch.nn.Linear\ndel KIND.forward",
        "import os\nos.environ['X'] = ''",
        "from torch.nn import Linear\nsetattr(Linear, 'forward', print)",
        "from torch.optim.optimizer import _foreach_supported_types as f\nf.append(int)",
        "def change(kind):\n    kind.__reduce__ = print",
    ],
)
def test_a_change_outside_is_found(code: str) -> None:
    assert [*changes(code)]


class Pull(Optimizer):
    """An optimizer of a user's own, which keeps what it computes of parameters."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["pull"] = parameter * 0.1 + parameter.grad
                    parameter.sub_(self.state[parameter]["pull"])


def stepped(optimizer: Optimizer, layer: torch.nn.Module) -> list[type]:
    """The types of what an optimizer keeps after a step, and of what is in a file of it."""
    tessel.distributed.gather(layer(torch.ones(2, 6))).square().sum().backward()
    optimizer.step()
    kept = [*optimizer.state.values(), *optimizer.state_dict()["state"].values()]
    return [type(each) for state in kept for each in state.values()]


def keeps_plain() -> None:
    layer = ParallelLinear(6, 5, dim=-1)
    for make in (Pull, lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.1)):
        optimizer = make(layer.parameters())
        for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            each.param_groups[0]["params"] = list(layer.parameters())
            found = stepped(each, layer)
            assert found and {*found} == {torch.Tensor}, found


def test_every_optimizer_of_shards_keeps_plain_tensors(run: Run) -> None:
    run(keeps_plain, nprocs=2)


def copied_lbfgs() -> list[str]:
    layer = ParallelLinear(6, 5, dim=-1)
    optimizer = LBFGS(layer.parameters())
    texts = []
    for each in (optimizer, copy.deepcopy(optimizer)):
        each.param_groups[0]["params"] = each._params = list(layer.parameters())  # type: ignore[attr-defined]
        before = layer.weight.detach().clone()
        with pytest.raises(ValueError, match="LBFGS of a parameter") as error:
            each.step(lambda: 0.0)
        assert torch.equal(before, layer.weight)
        texts.append(str(error.value))
    return texts


def test_a_copy_of_lbfgs_is_refused_too(run: Run) -> None:
    first, second = run(copied_lbfgs, nprocs=2)
    assert first == second


def test_optimizers_without_shards_get_no_hooks() -> None:
    ParallelLinear(6, 5, dim=-1)  # there are shards in this process
    plain = torch.nn.Linear(3, 2)
    for optimizer in (SGD(plain.parameters(), 0.1), LBFGS(plain.parameters())):
        optimizer.step(lambda: plain(torch.ones(3)).sum())
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
