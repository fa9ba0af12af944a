"""Which pass runs: backward passes, and checkpoints that compute something again in them."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether a backward pass runs, in which a checkpoint may compute something again."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether a checkpoint runs, which will compute again what is computed now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
