"""What workers do when, recorded: one trace of all of them, in Chrome's format.

`recorder` notes what this worker does, `clocks` compares the clocks of hosts, `merged` makes one
trace of what all have noted and finds who waited for whom, `block` is `tessel.trace`. It may import
`core`, `transport` and what stands below them.
"""

from tessel.tracing.block import trace as trace
