"""Local processes that run a function together, each as one worker of a world.

A *forkserver* process imports torch once and forks workers in milliseconds. This process
communicates with each worker over its own socket, and the forkserver reports how a worker ended.
Nothing outlives this process: when it ends, the forkserver ends the workers, regardless of what
they are doing. This package may import only `endings`, `errors`, `limits`, `machine` and
`settings`: workers join a job themselves.
"""

from tessel.launch.workers import Workers as Workers
from tessel.launch.workers import launch as launch
