"""Worker: a process that runs functions sent to it by another process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from tessel import endings
from tessel.joining import join_process_group
from tessel.launch.environment import OUTPUTS, flush_outputs, keep_lines_whole, redirect_outputs
from tessel.launch.fork import unshare_randomness
from tessel.launch.message import DUMP_STACKS, UNPICKLABLE, Call, Failure, Reply, receive, send
from tessel.launch.task import load_task


def work(channel: socket.socket, stacks: int, inherited: Callable[[], object] | None) -> None:
    """Answer calls until the other side hangs up.

    Args:
        channel: the socket to the process that makes the calls.
        stacks: the file for Python's stacks, written on a signal and on a crash.
        inherited: the function to call if this worker was forked from the process that has it.
    """
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_STACKS, stacks)
    keep_lines_whole()
    if inherited is None:
        unshare_randomness()
        _answer_calls(channel, None)
    else:
        # OpenMP's threads did not survive the fork, and the thread that forked would wait for
        # them forever. A new thread gets new ones.
        ThreadPoolExecutor(1).submit(_answer_calls, channel, inherited).result()


def _answer_calls(channel: socket.socket, inherited: Callable[[], object] | None) -> None:
    known = dict(os.environ)
    while message := receive(channel):
        reply, body = _answer(*message, known, inherited)
        flush_outputs()
        with contextlib.suppress(BrokenPipeError):
            send(channel, reply, body)


def _answer(
    call: Call | None,
    pickled: memoryview,
    fds: list[int],
    known: dict[str, str],
    inherited: Callable[[], object] | None,
) -> tuple[Reply, bytes]:
    """Make a call, or leave the world if there is none."""
    try:
        if call is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            return Reply(), b""
        redirect_outputs(fds[: len(OUTPUTS)])
        call.environment.enter(known, call.variables())
        if call.fresh:  # the worker with the listener serves the rendezvous
            serve: dict[str, Any] = {}
            if listener := fds[len(OUTPUTS) :]:
                serve = {"is_master": True, "master_listen_fd": listener[0]}
            size = call.nprocs
            store = dist.TCPStore("127.0.0.1", call.port, size, wait_for_workers=False, **serve)
            join_process_group(call.backend, store, call.rank, size)
        endings.begin_program(call.number)
        result = (inherited or load_task(pickled, call.main))()
        try:
            body = pickle.dumps(result)
        except UNPICKLABLE as error:
            raise TypeError(
                f"the result of worker {call.rank}, of type {type(result).__name__}, cannot be "
                f"pickled: {error}; return tensors, numbers, or containers of these"
            ) from error
        is_fit = endings.end_program()
        return Reply(in_world=is_fit and dist.is_initialized() == (call.nprocs > 1)), body
    except SystemExit:
        raise
    except BaseException as error:
        failure = Failure.of(error)
        endings.end_program(error)
        return Reply(failure), b""
