"""Local processes that run a function together, each as one worker of a world.

A *forkserver* process imports torch once and forks workers in milliseconds. This process talks to
each worker over a socket of its own, and the forkserver reports how a worker ended. Nothing of it
outlives this process: when it goes away the forkserver ends the workers, whatever they are doing.
"""

from tessel.launch.workers import Workers as Workers
from tessel.launch.workers import launch as launch
