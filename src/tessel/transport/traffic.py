"""Traffic: what a worker sent and received."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """What this worker sent and received, payload only; `agreements` are counted apart."""

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    agreements: int = 0
