"""Machine models: how fast a worker computes and sends, measured once and kept in a file.

`tessel doctor --measure` measures this machine. The file is `machine.json` in the user's cache
directory (`$XDG_CACHE_HOME/tessel`), or what the environment variable `TESSEL_MACHINE` names.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tessel.settings import text

VARIABLE = "TESSEL_MACHINE"


@dataclass(frozen=True)
class Rates:
    """How fast one worker is, of one thread, while some of them share a machine.

    Attributes:
        workers: how many run at once on the machine.
        call: seconds for which workers agree before an operator is applied.
        step: seconds that a step takes at least.
        latency: seconds of a message.
        bandwidth: bytes a second that a worker sends.
        memory: bytes a second that it reads and writes.
        fft: operations a second of Fourier transforms that include the last dimension.
        fft_across: the same of others.
        matrix: operations a second of products with a matrix.
        weights: bytes a second of weights that each are used once, as those of modes are.
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
class Machine:
    """What is known of the machines on which workers run.

    Attributes:
        cores: of one machine.
        rates: measured with several numbers of workers, ascending.
        origin: where the numbers come from.

    >>> built_in().rates_for(2).workers
    2
    """

    cores: int
    rates: tuple[Rates, ...]
    origin: str

    def rates_for(self, workers: int) -> Rates:
        """The rates when so many workers take part.

        As many as were measured share one machine. More are on further machines like this one,
        with one worker for each core.
        """
        for each in self.rates:
            if workers <= each.workers:
                return each
        return next((each for each in self.rates if each.workers >= self.cores), self.rates[-1])

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the model to a file, by default the one that is read."""
        target = model_path() if path is None else Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return target


def model_path() -> Path:
    """The file of the machine model."""
    if given := text(VARIABLE):
        return Path(given)
    cache = text("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tessel" / "machine.json"


def known_machine(path: str | os.PathLike[str] | None = None) -> Machine:
    """The model in the file, or the built-in one if there is no file.

    >>> known_machine("/no/such/file").origin
    'built in: a small machine; tessel doctor --measure measures this one'
    """
    source = model_path() if path is None else Path(path)
    try:
        written = source.read_bytes()
    except FileNotFoundError:
        return built_in()
    except OSError as error:
        raise ValueError(f"the machine model {source} cannot be read: {error.strerror}") from error
    try:
        found = json.loads(written)
        rates = tuple(Rates(**each) for each in found["rates"])
        numbers = [number for each in rates for number in asdict(each).values()]
        if not rates or not all(isinstance(n, int | float) and n > 0 for n in numbers):
            raise ValueError("all rates must be positive numbers")
        ascending = tuple(sorted(rates, key=lambda each: each.workers))
        return Machine(int(found["cores"]), ascending, str(found["origin"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{source} is not a machine model ({error}); measure again with tessel doctor "
            f"--measure, or remove the file"
        ) from error


def built_in() -> Machine:
    """A small machine with two cores, for when none was measured."""
    return Machine(
        2,
        (
            Rates(1, 2e-5, 2e-5, 2e-5, 2e10, 2.4e10, 1.6e10, 1.4e10, 8e10, 2e9),
            Rates(2, 3e-5, 2e-5, 2e-5, 2e10, 2.1e10, 1.5e10, 1.3e10, 8e10, 2e9),
            Rates(4, 1e-4, 2e-5, 5e-5, 2e9, 1.5e10, 8e9, 8e9, 5e10, 1.5e9),
        ),
        "built in: a small machine; tessel doctor --measure measures this one",
    )
