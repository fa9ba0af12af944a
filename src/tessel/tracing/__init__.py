"""A record of the activities of all workers over time: one trace, in Chrome's format.

`recorder` records the events of this worker, `clocks` compares the clocks of hosts, `merged` merges
the records of all workers and finds which worker waited for which, `block` is `tessel.trace`. It
may import `core`, `transport` and modules below them.
"""

from tessel.tracing.block import trace as trace
