"""What a program notices of Tessel before it uses it: `import tessel` leaves all others alone."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD
from torch.optim.optimizer import Optimizer

import tessel
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
