"""Rendezvous: how the launchers of `tessel run` and then their workers meet.

Torch's own (`c10d`) listens on all interfaces, accepts all connections, and unpickles received
data. This one has torch's store on the loopback interface of the first host, which launchers of
other hosts reach through a gate (`launch.gate`), and launchers exchange only numbers and JSON.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from tessel.launch.gate import Endpoint, Gate, GateError, Tunnel

BACKEND = "tessel"
SECONDS_TO_MEET = 600.0  # the same as torch's
_SECONDS_TO_LEAVE = 5.0
_LOOPBACK = "127.0.0.1"


class HostRendezvous(RendezvousHandler):
    """The rendezvous of the launchers of a job: torch's store, on loopback interfaces only.

    Args:
        job: the name of the job, the same on all hosts.
        hosts: the number of hosts.
        endpoint: the address of the first host's gate; None for one host, which needs none.
        token: the secret that all hosts know.
        seconds: how long to wait for the others.
    """

    def __init__(
        self, job: str, hosts: int, endpoint: Endpoint | None, token: bytes, seconds: float
    ) -> None:
        self._job, self._hosts, self._seconds = job, hosts, seconds
        self._door: Gate | Tunnel | None = None
        knocks = None if endpoint is None else endpoint.listen()
        self.is_first = endpoint is None or knocks is not None
        if self.is_first:
            # The system chooses the port, which nobody can take: torch serves on this socket.
            listener = socket.create_server((_LOOPBACK, 0), backlog=128)
            self._port = listener.getsockname()[1]
            settings: dict[str, Any] = {"is_master": True, "master_listen_fd": listener.detach()}
            if knocks is not None:
                self._door = Gate(knocks, self._port, token, job)
        else:
            assert endpoint is not None
            self._door, settings = Tunnel(endpoint, token, job, seconds), {}
            self._port = self._door.port
        limit = timedelta(seconds=seconds)
        try:
            self._store = dist.TCPStore(
                _LOOPBACK, self._port, timeout=limit, wait_for_workers=False, **settings
            )
        except dist.DistError as error:
            self.shutdown()
            raise GateError(f"the store of the job cannot be reached: {error}") from error

    @property
    def address(self) -> str:
        """The address of this host by which it reaches the others."""
        return _LOOPBACK if self._door is None else self._door.address

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.PrefixStore(f"tessel/{self._job}", self._store)
        try:
            # The host with the store is the first, so that workers of low ranks are near it.
            rank = 0 if self.is_first else store.add("hosts", 1)
            if rank >= self._hosts:
                raise RendezvousConnectionError(
                    f"this is host {rank + 1}, and the job has --nnodes {self._hosts}"
                )
            store.set(f"host/{rank}", "here")
            store.wait([f"host/{each}" for each in range(self._hosts)])
        except dist.DistStoreError as error:
            raise RendezvousTimeoutError(
                f"not all of {self._hosts} hosts came within {self._seconds:.0f} s"
            ) from error
        except dist.DistNetworkError as error:
            raise RendezvousConnectionError("the first host has left") from error
        info = RendezvousStoreInfo(_LOOPBACK, self._port)
        return RendezvousInfo(store, rank, self._hosts, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # the number of hosts is fixed

    def get_run_id(self) -> str:
        return self._job

    def shutdown(self) -> bool:
        if self._door is not None:  # through the first host's, others may still read the end
            self._door.close(_SECONDS_TO_LEAVE if self.is_first else 0.0)
        self._door = None
        return True


def rendezvous_of(parameters: RendezvousParameters) -> HostRendezvous:
    """The rendezvous made by `tessel run`; torch's launcher looks it up by name."""
    return parameters.config["rendezvous"]


rendezvous_handler_registry.register(BACKEND, rendezvous_of)
