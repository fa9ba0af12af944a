"""Traffic: what a worker sent and received."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(repr=False)
class Traffic:
    """What this worker sent and received, payload only; `agreements` are counted apart.

    Attributes:
        messages_between_hosts, bytes_between_hosts: of what it sent, what went to other hosts.
    """

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    agreements: int = 0
    messages_between_hosts: int = 0
    bytes_between_hosts: int = 0

    def __repr__(self) -> str:
        """As a dataclass has it, without what went to other hosts if there are none."""
        names = [each.name for each in fields(self)][: None if self.messages_between_hosts else -2]
        return f"Traffic({', '.join(f'{name}={getattr(self, name)}' for name in names)})"
