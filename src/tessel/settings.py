"""Settings: the environment variables that Tessel reads, and their valid values.

All other modules read variables through this one. An invalid value raises ValueError with one
sentence that names the variable, the valid values and the actual value.
"""

from __future__ import annotations

import datetime
import difflib
import math
import os
import warnings

PREFIX = "TESSEL_"
KNOWN = (
    *("TESSEL_ALLOCATOR", "TESSEL_CHECK", "TESSEL_CUDA_IPC", "TESSEL_DEBUG", "TESSEL_ENGINE"),
    *(
        "TESSEL_FFT",
        "TESSEL_LAUNCHER",
        "TESSEL_LOG",
        "TESSEL_MACHINE",
        "TESSEL_TIMEOUT",
        "TESSEL_TOKEN",
        "TESSEL_TRACE",
        "TESSEL_TRANSPORT",
    ),
)
# variables by which mpirun, srun and others tell a process that it is one of their tasks
OF_TASKS = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "PALS_RANKID", "PALS_SIZE", "ALPS_APP_PE"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    *("PBS_NODENUM", "PBS_TASKNUM", "PBS_VNODENUM"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_RANKID", "MPI_NRANKS"),
    *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "LSF_PM_TASKID"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    *("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "FLUX_TASK_LOCAL_ID"),
    *("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
)
_FOR_TESTS = "TESSEL_TEST_"  # prefix of variables that tests may define
_SHORTEST, _LONGEST = 1e-3, 1e9  # seconds; torch counts milliseconds
_warned: set[str] = set()


def text(variable: str) -> str | None:
    """The value of a variable; None if it is not set or empty."""
    return os.environ.get(variable) or None


def chosen(variable: str, options: tuple[str, ...]) -> str:
    """The option that a variable names; the first one if it is not set.

    >>> import os
    >>> from tessel.settings import chosen
    >>> chosen("TESSEL_EXAMPLE", ("one", "other"))
    'one'
    """
    choice = text(variable) or options[0]
    if choice not in options:
        raise ValueError(f"{variable} must be one of {', '.join(options)}, got {choice!r}")
    return choice


def whole_number(variable: str, default: int) -> int:
    """The whole number, at least 0, in a variable of a launcher such as LOCAL_RANK."""
    said = text(variable)
    return default if said is None else as_whole_number(variable, said)


def as_whole_number(variable: str, said: str) -> int:
    """The value of a variable as a whole number of at least 0."""
    if not (said.isascii() and said.isdigit() and len(said) < 10):
        raise ValueError(f"{variable} must be a whole number of 0 or more, got {said!r}")
    return int(said)


def time_limit() -> datetime.timedelta | None:
    """How long a worker waits for others: TESSEL_TIMEOUT, in seconds; None for torch's default."""
    said = text("TESSEL_TIMEOUT")
    if said is None:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not _SHORTEST <= seconds <= _LONGEST:  # also if it is NaN
        raise ValueError(
            f"TESSEL_TIMEOUT must be a number of seconds from {_SHORTEST:g} to {_LONGEST:g}, got "
            f"{said!r}"
        )
    return datetime.timedelta(seconds=seconds)


def warn_of_unknown() -> None:
    """Warn, once and only on the first worker, about unknown variables with Tessel's prefix."""
    found = [name for name in os.environ if name.startswith(PREFIX) and name not in KNOWN]
    for name in sorted(found):
        if name in _warned or name.startswith(_FOR_TESTS) or os.environ.get("RANK", "0") != "0":
            continue
        _warned.add(name)
        like = difflib.get_close_matches(name, KNOWN, 1)
        hint = f"; did you mean {like[0]}?" if like else f"; there are {', '.join(KNOWN)}"
        warnings.warn(f"Tessel knows no environment variable {name}{hint}", stacklevel=3)
