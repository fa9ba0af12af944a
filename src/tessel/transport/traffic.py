"""Traffic: the messages and bytes that a worker sent and received."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(repr=False)
class Traffic:
    """The messages and bytes that this worker sent and received, payload only.

    Attributes:
        agreements: the number of agreements, which the other totals do not include.
        messages_between_hosts, bytes_between_hosts: the part that was sent to other hosts.
    """

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    agreements: int = 0
    messages_between_hosts: int = 0
    bytes_between_hosts: int = 0

    def __repr__(self) -> str:
        """The representation of a dataclass, without traffic between hosts if there is none."""
        names = [each.name for each in fields(self)][: None if self.messages_between_hosts else -2]
        return f"Traffic({', '.join(f'{name}={getattr(self, name)}' for name in names)})"
