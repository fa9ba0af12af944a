"""The exceptions of Tessel that are not torch's or Python's own."""


class WorkerLost(RuntimeError):  # noqa: N818
    """A worker of this job died or stopped answering."""
