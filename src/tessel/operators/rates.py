"""Machine models: how fast a worker computes and sends, measured once and stored in a file.

`tessel doctor --measure` measures this machine. The file is `machine.json` in the user's cache
directory (`$XDG_CACHE_HOME/tessel`), or the one named by the environment variable `TESSEL_MACHINE`.
Files of `tessel/machines` are found by their names.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tessel.settings import text

VARIABLE = "TESSEL_MACHINE"
MACHINES = Path(__file__).parents[1] / "machines"  # models that come with Tessel


@dataclass(frozen=True)
class Rates:
    """The speed of one worker with one thread, while several of them share a machine.

    Attributes:
        workers: the number of workers that run at once on the machine.
        call: seconds of the agreement before an operator is applied.
        step: the least seconds of a step.
        latency: seconds of a message.
        bandwidth: bytes per second that a worker sends.
        memory: bytes per second that it reads and writes.
        fft: operations per second of Fourier transforms that include the last dimension.
        fft_across: the same for other dimensions.
        matrix: operations per second of products with a matrix.
        weights: bytes per second of weights that are used once each, such as those of modes.
    """

    workers: int
    call: float
    step: float
    latency: float
    bandwidth: float
    memory: float
    fft: float
    fft_across: float
    matrix: float
    weights: float


@dataclass(frozen=True)
class Network:
    """The connections between hosts.

    Attributes:
        workers_per_host: the number of workers that share the connection of their host.
        latency: seconds of a message between hosts.
        bandwidth: bytes per second that a host sends, all of its workers together.
        bisection: bytes per second that all hosts together exchange at most, however many there
            are;
            0 if their connections are the only limit.
    """

    workers_per_host: int
    latency: float
    bandwidth: float
    bisection: float = 0.0


@dataclass(frozen=True)
class Machine:
    """The properties of the machines on which workers run.

    Attributes:
        cores: the cores of one machine.
        rates: measured with several numbers of workers, in ascending order.
        origin: where the numbers come from.
        network: the network between such machines; None if it is unknown, and as fast as one
            machine.

    >>> built_in().rates_for(2).workers
    2
    """

    cores: int
    rates: tuple[Rates, ...]
    origin: str
    network: Network | None = None

    def rates_for(self, workers: int) -> Rates:
        """The rates for this number of workers.

        As many workers as were measured share one machine. Further ones are on more machines like
        it, with one worker for each core.
        """
        for each in self.rates:
            if workers <= each.workers:
                return each
        return next((each for each in self.rates if each.workers >= self.cores), self.rates[-1])

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the model to a file, by default the one from which it is read."""
        target = model_path() if path is None else Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        known = {key: value for key, value in asdict(self).items() if value is not None}
        target.write_text(json.dumps(known, indent=2) + "\n")
        return target


N = TypeVar("N", Rates, Network)


def model_path() -> Path:
    """The file of the machine model."""
    if given := text(VARIABLE):
        return Path(given)
    cache = text("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tessel" / "machine.json"


def known_machine(path: str | os.PathLike[str] | None = None) -> Machine:
    """The model in the file, or the built-in one if there is no file.

    Args:
        path: the file, or the name of a machine that comes with Tessel, such as "jean-zay"; by
            default the file of this machine. If a given file does not exist, it raises.

    >>> known_machine("jean-zay").cores
    40
    """
    source = model_path() if path is None else Path(path)
    if path is not None and not source.exists() and source.parent == Path():
        shipped = MACHINES / f"{source.name.removesuffix('.json')}.json"
        source = shipped if shipped.exists() else source
    try:
        written = source.read_bytes()
    except FileNotFoundError:
        if path is None:
            return built_in()
        names = ", ".join(sorted(each.stem for each in MACHINES.glob("*.json")))
        raise ValueError(
            f"there is no machine model {source}; name a file that tessel doctor --measure has "
            f"written, or one of {names}"
        ) from None
    except OSError as error:
        raise ValueError(f"the machine model {source} cannot be read: {error.strerror}") from error
    try:
        return _machine(json.loads(written))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{source} is not a machine model ({error}); measure again with tessel doctor "
            f"--measure, or remove the file"
        ) from error


def _machine(found: Any) -> Machine:
    """A model from the contents of a file; ValueError names the invalid key."""
    if not isinstance(found, dict):
        raise ValueError(f"it must be an object with keys, got {type(found).__name__}")
    known = {field.name for field in fields(Machine)} | {"notes"}  # which are for readers
    _check_keys("", found, known, {"cores", "rates", "origin"})
    if not isinstance(found["rates"], list) or not found["rates"]:
        raise ValueError("rates must be a list of at least one object")
    rates = tuple(_numbers(Rates, f"rates[{k}]", each) for k, each in enumerate(found["rates"]))
    network = found.get("network")
    return Machine(
        _count("cores", found["cores"]),
        tuple(sorted(rates, key=lambda each: each.workers)),
        str(found["origin"]),
        None if network is None else _numbers(Network, "network", network),
    )


def _numbers(kind: type[N], where: str, found: Any) -> N:
    """An object of positive numbers."""
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be an object with keys, got {found!r}")
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    names = {field.name for field in fields(kind)}
    _check_keys(f"{where}.", found, names, names - optional)
    for name, value in found.items():
        if name.startswith("workers"):
            _count(f"{where}.{name}", value)
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least = 0 if name in optional else 1e-300
        if not is_number or not least <= value < math.inf:
            raise ValueError(f"{where}.{name} must be a positive number, got {value!r}")
    return kind(**found)


def _check_keys(where: str, found: dict[str, Any], known: set[str], needed: set[str]) -> None:
    for name in sorted(needed - found.keys()):
        raise ValueError(f"{where}{name} is missing")
    for name in sorted(found.keys() - known):
        raise ValueError(f"unknown key {where}{name}; expected one of {', '.join(sorted(known))}")


def _count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where} must be a whole number of 1 or more, got {value!r}")
    return value


def built_in() -> Machine:
    """The model of a small machine with two cores, used if none was measured."""
    return Machine(
        2,
        (
            Rates(1, 2e-5, 2e-5, 2e-5, 2e10, 2.4e10, 1.6e10, 1.4e10, 8e10, 2e9),
            Rates(2, 3e-5, 2e-5, 2e-5, 2e10, 2.1e10, 1.5e10, 1.3e10, 8e10, 2e9),
            Rates(4, 1e-4, 2e-5, 5e-5, 2e9, 1.5e10, 8e9, 8e9, 5e10, 1.5e9),
        ),
        "built in: a small machine; tessel doctor --measure measures this one",
    )
