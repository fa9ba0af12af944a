"""Launchers: what the variables of srun and mpirun say, and scripts that they start.

Tests `transport/launchers.py`, `transport/world.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import tessel
from tessel.settings import OF_TASKS
from tessel.transport import launchers, world
from tessel.transport.launchers import (
    FIRST_PORT,
    FLUX,
    JSRUN,
    MPICH,
    MVAPICH,
    NUM_PORTS,
    OPEN_MPI,
    SLURM,
    LaunchedJob,
    find_job,
    hosts_of,
    meet,
)

# What the launchers of Debian 12 set (Open MPI 4.1, MPICH 4.0, SLURM 22.05), less what nobody reads
OF_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "98697217",
    "PMIX_NAMESPACE": "98697217",
    "PMIX_RANK": "1",
}
OF_MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "4",
    "MPI_LOCALRANKID": "2",
    "PMI_FD": "6",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
OF_MVAPICH = {
    "MV2_COMM_WORLD_LOCAL_RANK": "2",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "4",
    "PMI_ID": "2",
    "PMI_SIZE": "4",  # and no PMI_RANK, of mpirun_rsh
}
OF_JSRUN = {
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "4",
    "LSB_JOBID": "12",
    "PMIX_NAMESPACE": "12-1",
    "PMIX_RANK": "1",
}
OF_FLUX = {
    "FLUX_JOB_ID": "f123",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "3",
    "FLUX_TASK_RANK": "3",
    "PMI_FD": "6",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
OF_PBS = {"PBS_JOBID": "1.server", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_VNODENUM": "0"}
OF_BATCH = {  # the script of sbatch: it has a number, but is no task
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
OF_SALLOC = {k: v for k, v in OF_BATCH.items() if k not in ("SLURM_PROCID", "SLURM_LOCALID")}
OF_SRUN = OF_BATCH | {
    "SLURM_GTIDS": "2,3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OF_DAEMON = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}  # one for each host, of mpirun
ON_ONE_HOST = {"SLURM_GTIDS": "0,1,2,3", "SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "node07"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launcher", "place", "local", "address"),
    [
        (OF_OPEN_MPI, OPEN_MPI, (1, 4), (1, 4), "127.0.0.1"),
        (OF_OPEN_MPI | {"MASTER_ADDR": "10.1.2.3"}, OPEN_MPI, (1, 4), (1, 4), "10.1.2.3"),
        # Open MPI in a job of SLURM: on other hosts its daemons are tasks of srun
        (OF_SRUN | OF_OPEN_MPI, OPEN_MPI, (1, 4), (1, 4), "127.0.0.1"),
        (
            OF_SRUN | OF_OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            OPEN_MPI,
            (1, 4),
            (1, 2),
            "node01",
        ),
        (OF_BATCH | OF_OPEN_MPI, OPEN_MPI, (1, 4), (1, 4), "127.0.0.1"),
        (OF_MPICH, MPICH, (2, 4), (2, 4), "127.0.0.1"),
        (OF_SRUN | OF_DAEMON | OF_MPICH, MPICH, (2, 4), (2, 4), "127.0.0.1"),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
            | {"PALS_APID": "a-b", "MASTER_ADDR": "x1000c0"},
            MPICH,
            (5, 8),
            (1, 4),
            "x1000c0",
        ),
        (OF_SRUN, SLURM, (3, 4), (1, 2), "node01"),
        (
            {"PALS_RANKID": "5", "PALS_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
            | {"MASTER_ADDR": "x1000c0"},
            MPICH,
            (5, 8),
            (1, 4),
            "x1000c0",
        ),
        (OF_MVAPICH, MVAPICH, (2, 4), (2, 4), "127.0.0.1"),
        (OF_SRUN | OF_DAEMON | OF_MVAPICH, MVAPICH, (2, 4), (2, 4), "127.0.0.1"),
        (OF_JSRUN, JSRUN, (1, 4), (1, 4), "127.0.0.1"),
        (OF_JSRUN | OF_OPEN_MPI, OPEN_MPI, (1, 4), (1, 4), "127.0.0.1"),  # of Spectrum MPI
        (OF_FLUX, FLUX, (3, 4), (3, 4), "127.0.0.1"),
        (OF_FLUX | OF_MPICH, MPICH, (2, 4), (2, 4), "127.0.0.1"),  # mpirun within one of its tasks
        (OF_SRUN | ON_ONE_HOST, SLURM, (3, 4), (3, 4), "127.0.0.1"),
        (OF_SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, SLURM, (3, 4), (1, 2), "node01"),  # pmi2
        (without(OF_SRUN, "SLURM_STEP_NUM_TASKS"), SLURM, (3, 4), (1, 2), "node01"),
        (without(OF_SRUN, "SLURM_GTIDS"), SLURM, (3, 4), (1, 2), "node01"),
        (OF_SRUN | {"SLURM_STEP_NODELIST": "node02"}, SLURM, (3, 4), (1, 2), "node02"),
        (
            {k: v for k, v in OF_SRUN.items() if "NODELIST" not in k},
            SLURM,
            (3, 4),
            (1, 2),
            "10.0.0.9",
        ),
        (OF_SRUN | {"WORLD_SIZE": "4", "MASTER_ADDR": "h"}, SLURM, (3, 4), (1, 2), "h"),
        (OF_SRUN | {"TESSEL_LAUNCHER": "slurm"} | OF_OPEN_MPI, SLURM, (3, 4), (1, 2), "node01"),
    ],
)
def test_jobs(
    environ: dict[str, str],
    launcher: launchers.Launcher,
    place: tuple[int, int],
    local: tuple[int, int],
    address: str,
) -> None:
    job = find_job(environ)
    assert job is not None and job.launcher is launcher and job.address == address
    assert (job.rank, job.workers) == place and (job.local_rank, job.local_workers) == local
    assert FIRST_PORT <= job.port < FIRST_PORT + NUM_PORTS
    assert job.variables == {
        "RANK": str(place[0]),
        "WORLD_SIZE": str(place[1]),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(job.port),
    }


@pytest.mark.parametrize(
    "environ",
    [
        {},
        OF_BATCH,
        OF_SALLOC,
        OF_SRUN | {"SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290"},  # salloc's shell
        OF_SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 --pty bash
        OF_SRUN | {"TESSEL_LAUNCHER": "none"},
        OF_OPEN_MPI | {"TESSEL_LAUNCHER": "none"},
        OF_OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        OF_MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        OF_PBS | {"PBS_NP": "8"},  # a script of qsub
        OF_PBS | {"PBS_NP": "1", "PBS_TASKNUM": "2"},
        OF_PBS | {"PBS_TASKNUM": "3", "TESSEL_LAUNCHER": "none"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": " 1"},
        {"RANK": "0"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_RANK": "-1"},  # as programs set it that find no launcher
        OF_BATCH | {"SLURM_STEP_ID": "batch"},
        {"MPI_RANKID": "0", "MPI_NRANKS": "1"},
        {"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "4", "LSB_HOSTS": "a a b b"},  # a script of bsub
        {"LSF_PM_TASKID": "1", "LSB_DJOB_NUMPROC": "1"},
        OF_BATCH | {"SLURM_PROCID": "1", "TESSEL_LAUNCHER": "none"},
        {"WORLD_SIZE": "four", "TESSEL_LAUNCHER": "none"},
        {"RANK": "sergeant"},
        {"WORLD_SIZE": "4", "TESSEL_LAUNCHER": "none"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "12"},  # prterun -n 1
        {"ALPS_APP_PE": "0"},
        OF_JSRUN | {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"},
        OF_FLUX | {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_worlds_of_one(environ: dict[str, str]) -> None:
    assert find_job(environ) is None


def size_of_world() -> int:
    return tessel.world().size


@pytest.mark.alone
@pytest.mark.parametrize(
    "environ",
    [
        OF_OPEN_MPI,
        OF_MPICH | OF_MVAPICH | OF_JSRUN | OF_FLUX | OF_PBS,
        OF_SRUN,
        {"MPI_RANKID": "1", "MPI_NRANKS": "4", "LSF_PM_TASKID": "2"},
    ],
)
def test_workers_of_a_task_are_no_tasks(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert find_job(without({**os.environ}, *OF_TASKS)) is None
    for count in (1, 2):
        assert tessel.launch(size_of_world, count) == [count] * count


SEVERAL_HOSTS = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (OF_OPEN_MPI | SEVERAL_HOSTS, "set MASTER_ADDR to an address of the host of task 0"),
        (OF_OPEN_MPI | SEVERAL_HOSTS, "-x MASTER_ADDR=…, or TESSEL_LAUNCHER=none"),
        (OF_OPEN_MPI | SEVERAL_HOSTS | {"PBS_NODEFILE": "/nowhere"}, "set MASTER_ADDR"),
        (OF_MPICH | {"MPI_LOCALNRANKS": "3"}, "-genv MASTER_ADDR …"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "on an unknown number of them"),
        (without(OF_OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK is not set; set RANK"),
        (without(OF_MPICH, "PMI_SIZE"), "PMI_RANK=2 says that mpirun of MPICH or Intel MPI has"),
        (
            OF_OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"},
            "contradict each other: OMPI_COMM_WORLD_RANK",
        ),
        (OF_OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK=4"),
        (OF_OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE=5"),
        (OF_SRUN | {"SLURM_PROCID": "9"}, "SLURM_PROCID=9 is not below SLURM_STEP_NUM_TASKS=4"),
        (OF_SRUN | {"SLURM_PROCID": "one"}, "SLURM_PROCID must be a whole number of 0 or more"),
        (OF_SRUN | {"SLURM_GTIDS": "0,1,2,3,4"}, "SLURM_GTIDS=0,1,2,3,4"),
        (OF_SRUN | {"SLURM_STEP_NODELIST": "node[3-1]"}, "SLURM_STEP_NODELIST: expected ranges"),
        (without(OF_SRUN, "SLURM_GTIDS") | {"SLURM_STEP_TASKS_PER_NODE": "x"}, "look like 2(x3)"),
        (OF_SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but srun says 4; unset it"),
        (OF_SRUN | {"RANK": "0"}, "RANK is 0, but srun says 3; unset it"),
        (OF_SRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT must be from 1 to 65535, got 70000"),
        (OF_SRUN | {"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number"),
        (
            OF_SRUN | {"TESSEL_LAUNCHER": "ssh"},
            "must be one of auto, none, openmpi, mvapich, mpich, jsrun, flux, slurm, got 'ssh'",
        ),
        (OF_FLUX | {"FLUX_JOB_NNODES": "2"}, "flux run has started 4 tasks, on several hosts or"),
        (OF_JSRUN | {"JSM_NAMESPACE_LOCAL_SIZE": "2"}, "-E MASTER_ADDR=…, or TESSEL_LAUNCHER=none"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_RANK is not set; set RANK"),
        ({"JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_RANK is not set; set RANK"),
        ({"FLUX_JOB_SIZE": "4"}, "FLUX_TASK_RANK is not set; set RANK"),
        ({"PALS_SIZE": "4"}, "PALS_SIZE=4 says that mpirun of MPICH or Intel MPI has started"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 says that this is one of several tasks, but RANK is"),
        ({"RANK": "2"}, "RANK=2 says that this is one of several tasks, but WORLD_SIZE is not set"),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "12"}, "PMIx does not say of how many; set RANK"),
        ({"ALPS_APP_PE": "2"}, "aprun does not say of how many; set RANK"),
        (OF_PBS | {"PBS_TASKNUM": "3", "PBS_NP": "8"}, "PBS_TASKNUM=3 says that this is one of"),
        (OF_PBS | {"PBS_VNODENUM": "2"}, "start tasks with mpirun; set RANK, WORLD_SIZE"),
        ({"WORLD_SIZE": " 4"}, "WORLD_SIZE=4 says that this is one of several tasks, but RANK is"),
        (
            {"WORLD_SIZE": "4.0"},
            "WORLD_SIZE must be a whole number, got '4.0', and RANK is not set",
        ),
        ({"WORLD_SIZE": "abc"}, "unset it, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 says that this is one of several tasks, but RANK and"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 says that this is one"),
        (OF_BATCH | {"SLURM_PROCID": "1"}, "SLURM_PROCID=1 says that this is one of several"),
        (OF_SRUN | {"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID has no number of a step of srun"),
        (
            without(OF_SRUN, "SLURM_STEP_ID", "SLURM_STEPID") | {"SLURM_PROCID": "0"},
            "SLURM_STEP_NUM_TASKS=4 says that this is one of several tasks, but SLURM_STEP_ID",
        ),
        (OF_SRUN | {"SLURM_PROCID": "5"}, "heterogeneous jobs, which are not supported: start all"),
        (
            {"OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "OMPI_COMM_WORLD_LOCAL_RANK=1 says that this is one of several tasks, but "
            "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are not set; set RANK",
        ),
        ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS=2 says that this is one of several tasks"),
        ({"MPI_RANKID": "1", "MPI_NRANKS": "4"}, "how tasks of Platform MPI meet; set RANK"),
        ({"MPI_RANKID": "0", "MPI_NRANKS": "4"}, "MPI_NRANKS=4 says that this is one of several"),
        ({"LSF_PM_TASKID": "1", "LSB_JOBID": "7"}, "blaunch does not say of how many; set RANK"),
        (OF_BATCH | {"TESSEL_LAUNCHER": "slurm"}, "the variables of srun are not set"),
    ],
)
def test_tasks_that_cannot_meet_raise(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        find_job(environ)


LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("variables", [OF_OPEN_MPI, OF_MPICH, OF_SRUN, OF_FLUX])
def test_a_world_of_one_that_was_left_over_raises(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (variables | LEFT_OVER).items():
        monkeypatch.setenv(name, value)
    for reads in (tessel.world, world.launched_as, world.launched_task):
        with pytest.raises(ValueError, match=r"WORLD_SIZE is 1, but .* says 4; unset RANK"):
            reads()
    # as torchrun starts it in each task, or as one is asked for
    for name, value in (("TORCHELASTIC_RUN_ID", "7"), ("TESSEL_LAUNCHER", "none")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert world.launched_task() == (0, 1)


def test_one_rank_for_all_tasks_is_named_when_they_do_not_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a batch script that exports its own SLURM_PROCID."""
    with socket.create_server(("127.0.0.1", 0)) as first:  # where task 0 listens
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first.getsockname()[1])}
        for name, value in (OF_SRUN | place | {"RANK": "0", "WORLD_SIZE": "4"}).items():
            monkeypatch.setenv(name, value)
        text = "RANK is 0 and WORLD_SIZE is 4, but this is task 3 of 4 of srun: unset both"
        with pytest.raises(RuntimeError, match=f"(?s)listen.*{text}"):
            tessel.world()
    for name, value in (("TORCHELASTIC_RUN_ID", "7"), ("TESSEL_LAUNCHER", "none"), ("RANK", "3")):
        with monkeypatch.context() as patch:  # those of torchrun in each task, or those of the task
            patch.setenv(name, value)
            assert launchers.other_place(os.environ) == ""


OF_A_SCRIPT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@pytest.mark.parametrize(
    ("variables", "more"),
    [
        # a script that sets RANK=$OMPI_COMM_WORLD_RANK and the like, under another mpirun
        (OF_MPICH, dict.fromkeys(OF_A_SCRIPT, "")),
        (OF_MPICH, {"WORLD_SIZE": "4", "RANK": ""}),
        # and one that sets no place to meet, which the launcher gives
        (OF_OPEN_MPI, {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}),
        (OF_SRUN, {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": ""}),
    ],
)
def test_scripts_may_set_some_of_the_variables_of_torchrun(
    variables: dict[str, str], more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*OF_A_SCRIPT, "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are gone afterwards
        monkeypatch.delenv(name)
    for name, value in (variables | more).items():
        monkeypatch.setenv(name, value)
    job = find_job(variables)
    assert job is not None and world.launched_as() == str(job)
    assert world.launched_task() == (job.rank, job.workers)
    met: list[LaunchedJob] = []
    monkeypatch.setattr(world, "meet", lambda job, limit: met.append(job) or dist.HashStore())
    monkeypatch.setattr(world, "_gpus_seen", tuple)
    monkeypatch.setattr(world, "_own_gpu", lambda store, place: None)
    monkeypatch.setattr(world, "_places", {})
    monkeypatch.setattr(world.dist, "init_process_group", lambda *args, **settings: None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    assert world.join() and met == [job]
    assert {name: os.environ[name] for name in OF_A_SCRIPT} == {
        name: job.variables[name] for name in OF_A_SCRIPT
    }


def test_pbs_lists_its_hosts_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("r1i0n3\nr1i0n3\nr1i0n7\n")
    job = find_job(OF_OPEN_MPI | SEVERAL_HOSTS | {"PBS_NODEFILE": str(tmp_path / "nodes")})
    assert job is not None and job.address == "r1i0n3"


def test_ports_are_those_of_jobs() -> None:
    def port(**more: str) -> int:
        job = find_job(OF_SRUN | more)
        assert job is not None
        return job.port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_GTIDS="0,1")
    assert len({port(SLURM_JOB_ID=str(number)) for number in range(100)}) > 95
    assert port(SLURM_STEP_ID="1") != port()  # steps of one job may run beside each other
    assert port(MASTER_PORT="4711") == 4711


NAMES = st.text("abcxyz-_.0189", min_size=1, max_size=6)


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, list[str]]:
    """An entry of a list of hosts, and the hosts."""
    text, hosts = "", [""]
    for _ in range(draw(st.integers(1, 2))):
        prefix = draw(NAMES)
        text, hosts = text + prefix, [host + prefix for host in hosts]
        if not draw(st.booleans()):
            continue
        width, spans, numbers = draw(st.integers(1, 4)), [], []
        for _ in range(draw(st.integers(1, 3))):
            low = draw(st.integers(0, 200))
            high = low + draw(st.integers(0, 12))
            spans.append(f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else ""))
            numbers += [f"{number:0{width}}" for number in range(low, high + 1)]
        text, hosts = f"{text}[{','.join(spans)}]", [h + n for h in hosts for n in numbers]
    return text, hosts


@given(st.lists(entries(), min_size=1, max_size=4))
def test_lists_of_hosts(parts: list[tuple[str, list[str]]]) -> None:
    found = list(hosts_of(",".join(text for text, _ in parts)))
    assert found == [host for _, hosts in parts for host in hosts]


@given(st.text("ab[]-,019 ", max_size=12))
def test_any_text_is_a_list_of_hosts_or_refused(text: str) -> None:
    try:
        first = next(hosts_of(text))
    except ValueError as error:
        assert "expected " in str(error) and repr(text) in str(error)
    else:
        assert first and not {*first} & {*"[], "}


def test_long_lists_cost_nothing() -> None:
    assert next(hosts_of("node[000000001-999999999]")) == "node000000001"


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol is not installed")
@pytest.mark.parametrize("text", ["node[01-03,7],gpu-a", "a[1-2]b[08-11]", "n[98-101],m", "one"])
def test_lists_of_hosts_are_those_of_scontrol(text: str) -> None:
    said = subprocess.run(
        ["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=60
    )
    if said.returncode:
        pytest.skip(f"scontrol does not run here: {said.stderr.splitlines()[-1:]}")
    assert list(hosts_of(text)) == said.stdout.split()


# --- meeting


def job_of(rank: int, port: int, workers: int = 2, name: str = "test") -> LaunchedJob:
    return LaunchedJob(SLURM, rank, workers, rank, workers, "127.0.0.1", port, name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def outcomes(jobs: Sequence[LaunchedJob], seconds: float) -> list[str]:
    """What each of these tasks gets when they meet, each in a thread."""
    found: list[str] = [""] * len(jobs)
    stores = []

    def come(number: int) -> None:
        try:
            stores.append(meet(jobs[number], timedelta(seconds=seconds)))
            found[number] = "met"
        except RuntimeError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=come, args=(each,)) for each in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_tasks_meet() -> None:
    port = free_port()
    assert outcomes([job_of(rank, port, 3) for rank in (2, 0, 1)], 30.0) == ["met"] * 3


def test_a_task_that_does_not_come_is_named_by_all() -> None:
    begin, port = time.monotonic(), free_port()
    found = outcomes([job_of(0, port, 4), job_of(2, port, 4)], 1.0)
    assert all("workers 1, 3 did not come" in text for text in found)
    assert time.monotonic() - begin < 20


def test_nobody_listens() -> None:
    (found,) = outcomes([job_of(1, free_port())], 0.5)
    assert "worker 1 of 2, started by srun; all meet at 127.0.0.1:" in found
    assert "MASTER_ADDR and MASTER_PORT choose another address" in found


def test_the_port_of_another_job() -> None:
    port = free_port()
    found = outcomes([job_of(0, port), job_of(1, port, name="other")], 2.0)
    assert "workers 1 did not come" in found[0]
    assert "listens there has 2 tasks of test" in found[1] and "set MASTER_PORT" in found[1]


def test_two_tasks_with_one_number() -> None:
    port = free_port()
    found = outcomes([job_of(0, port, 3), job_of(1, port, 3), job_of(1, port, 3)], 10.0)
    assert all("two tasks say that they are worker 1 of 3" in text for text in found)


def test_a_port_that_is_in_use() -> None:
    text = r"in use on .* set MASTER_PORT to a free one"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(RuntimeError, match=text),
    ):
        meet(job_of(0, server.getsockname()[1]), timedelta(seconds=1))


@pytest.mark.parametrize(
    ("address", "local", "text"),
    [
        ("192.0.2.77", 2, "is no address of .*, where worker 0 runs .* set MASTER_ADDR"),
        ("localhost", 1, "where no other host can reach it; set MASTER_ADDR"),
        ("no-such-host.invalid", 1, "cannot look up 'no-such-host.invalid'"),
    ],
)
def test_addresses_at_which_worker_0_cannot_listen(address: str, local: int, text: str) -> None:
    job = LaunchedJob(OPEN_MPI, 0, 2, 0, local, address, free_port(), "test")
    with pytest.raises(RuntimeError, match=text):
        meet(job, timedelta(seconds=1))


A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


@pytest.mark.parametrize(
    ("workers", "numbers"),
    [
        ([(0, (A, B)), (1, (A, B))], [0, 1]),
        ([(1, (A, B, C)), (0, (A, B, C))], [1, 0]),  # by local rank
        ([(0, (A, B)), (0, (A, B))], [0, 1]),  # which nobody has set
        ([(0, (A, B)), (1, (A, B)), (0, (C, D)), (1, (C, D))], [0, 1, 0, 1]),  # two hosts
        # CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK, and srun --gpus-per-task=1
        ([(0, (A,)), (1, (B,)), (2, (C,))], [0, 0, 0]),
        # srun --gpu-bind=closest, in the order of numbers and in turns
        ([(0, (C, D)), (1, (C, D)), (2, (A, B)), (3, (A, B))], [0, 1, 0, 1]),
        ([(0, (A, B)), (1, (C, D)), (2, (A, B)), (3, (C, D))], [0, 0, 1, 1]),
    ],
)
def test_each_worker_has_a_gpu(workers: list[tuple[int, tuple[str, ...]]], numbers: Any) -> None:
    assert world.shared_out(workers) == (numbers, "")


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ([(0, ()), (1, ())], ""),
        ([(0, (A,)), (1, (A,))], "2 workers see the same 1 GPU"),
        ([(0, (A, B)), (1, (A, B)), (2, (A, B)), (0, (C,))], "3 workers see the same 2 GPUs"),
        ([(0, (A,)), (0, ())], "1 of 2 workers see no GPU"),
        ([(0, (A, B)), (1, (B, A)), (2, (A, C))], "workers 0, 2 see other GPUs each, but not one"),
    ],
)
def test_workers_share_gpus(workers: list[tuple[int, tuple[str, ...]]], problem: str) -> None:
    numbers, said = world.shared_out(workers)
    assert numbers == [] and said.startswith(problem) and bool(said) is bool(problem)


@pytest.mark.parametrize("seen", [[(A,), (B,)], [(A,), (A,)], [(), ()]])
def test_all_workers_choose_gpus_alike(
    seen: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they join, in the store in which they meet."""
    store, here = dist.HashStore(), threading.local()
    monkeypatch.setattr(world, "_gpus_seen", lambda: seen[here.rank])

    def choose(rank: int) -> int | None:
        here.rank = rank
        return world._own_gpu(store, world._LauncherStore(store, rank, 2))

    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(2) as threads:
        warnings.simplefilter("always")
        found = list(threads.map(choose, range(2)))
    assert found == ([0, 0] if len({*seen}) == 2 else [None, None])
    texts = [str(each.message) for each in caught]
    assert all(each.startswith("2 workers see the same 1 GPU: tensors") for each in texts)
    assert len(texts) == (2 if seen == [(A,), (A,)] else 0)


# --- the launchers themselves

SCRIPT = """
import os, sys, torch, tessel
world = tessel.world()
total = tessel.nn.AllSumReduce(world, [0])(torch.full((3,), float(world.rank + 1)))
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
line = [world.rank, world.size, total[0].item(), *(os.environ.get(name) for name in names)]
open(f"{sys.argv[1]}-{world.size}-{world.rank}-{os.getpid()}", "w").write(repr(line))
"""
COMMANDS = {
    "openmpi": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "3"),
    "mpich": ("mpirun.mpich", "-n", "3"),
    "slurm": ("srun", "--overcommit", "-n", "3"),
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("is_on_one_host", [True, False])
def test_tasks_with_the_variables_of_srun_are_one_job(is_on_one_host: bool, tmp_path: Path) -> None:
    """Processes as srun starts them: they meet by what their variables say, and sum."""
    (tmp_path / "script.py").write_text(SCRIPT)
    outer = without(dict(os.environ), *OF_TASKS, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    tasks = []
    for rank in range(3):
        own = {
            "OMP_NUM_THREADS": "1",
            "TESSEL_TIMEOUT": "60",
            "SLURM_JOB_ID": str(os.getpid()),  # another port for each test
            "SLURM_STEP_ID": str(int(is_on_one_host)),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "3",
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_NODEID": "0",
        }
        if is_on_one_host:
            own |= {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_STEP_NODELIST": "no-such-host"}
        else:  # nothing says how many hosts there are
            own |= {"SLURM_LAUNCH_NODE_IPADDR": _own_address()}
        command = [sys.executable, "script.py", "said"]
        tasks.append(subprocess.Popen(command, cwd=tmp_path, env=outer | own, stderr=-1, text=True))
    errors = [task.communicate(timeout=100)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 3, errors
    said = sorted(eval(file.read_text()) for file in tmp_path.glob("said-*"))
    local, address = ("3", "127.0.0.1") if is_on_one_host else (None, _own_address())
    assert said == [[rank, 3, 6.0, str(rank), local, address] for rank in range(3)]


def _own_address() -> str:
    """An address of this machine that others can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("192.0.2.1", 9))  # of datagrams: nothing is sent
        except OSError:
            pytest.skip("this machine has no address but that of its loopback interface")
        return str(way.getsockname()[0])


def launch(name: str, tmp_path: Path, **more: str) -> list[list[object]]:
    """What the tasks of a script say that a launcher has started."""
    command = COMMANDS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: openmpi-bin, mpich, slurm-client)")
    if name == "slurm" and subprocess.run(["sinfo"], capture_output=True, timeout=60).returncode:
        pytest.skip("no SLURM controller answers here")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [*command, sys.executable, "script.py", "said"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TESSEL_TIMEOUT": "60"} | more,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(eval(file.read_text()) for file in tmp_path.glob("said-*"))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", COMMANDS)
def test_launchers_start_one_job(name: str, tmp_path: Path) -> None:
    said = launch(name, tmp_path)
    assert said == [[rank, 3, 6.0, str(rank), "3", "127.0.0.1"] for rank in range(3)]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", COMMANDS)
def test_launchers_start_worlds_of_one(name: str, tmp_path: Path) -> None:
    said = launch(name, tmp_path, TESSEL_LAUNCHER="none")
    assert said == [[0, 1, 1.0, None, None, None]] * 3
