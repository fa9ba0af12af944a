"""The acts of `tessel demo`: each shows that several workers compute what one process computes.

A new act is a file here with an `Act`, and its name in `ACTS`.
"""

from tessel.cli.acts import movements
from tessel.cli.acts.act import Act as Act

ACTS: tuple[Act, ...] = (movements.ACT,)
