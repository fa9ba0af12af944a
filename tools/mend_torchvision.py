"""Let torchvision load beside a torch without CUDA, in the virtual environment that runs this file.

PyPI's wheels of torchvision for Linux are built for CUDA. Beside a CPU build of torch their
compiled operators do not load, which torchvision allows; but it then registers shapes for two of
them, `nms` and `qnms`, that only the compiled part defines: `import torchvision` fails, and with it
`import deepinv`. This adds the definitions of the two to the torchvision that is installed here.
They have no kernels: to call one of them still raises.

`make venv` runs it on `.venv`, and `benchmarks/setup_peers.sh` on `build/peers`. Nothing happens
where torchvision is missing, loads already (as in a second run), or fails for another reason.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REASON = "operator torchvision::nms does not exist"
DEFINITIONS = """

# Added by Tessel's tools/mend_torchvision.py: what the compiled part would define.
if not _has_ops() and not hasattr(torch.ops.torchvision, "nms"):
    _schemas = torch.library.Library("torchvision", "FRAGMENT")  # a name, so that it is kept
    for _name in ("nms", "qnms"):
        _schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def failure() -> str:
    """What `import torchvision` says when it fails, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", "import torchvision"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def mend(path: Path) -> None:
    """Add the definitions to torchvision's extension.py, which runs before they are needed."""
    changed = path.with_suffix(".changed")
    changed.write_text(path.read_text() + DEFINITIONS)
    os.replace(changed, path)  # never half a file; and a cache that is linked here stays as it is


def main() -> None:
    if sys.prefix == sys.base_prefix:
        raise SystemExit("not in a virtual environment: nothing else is ever changed")
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or not (said := failure()):
        return
    if REASON in said:
        mend(Path(spec.origin).with_name("extension.py"))
        said = failure()
    if said:  # most of Tessel works without torchvision: `make` goes on
        print(f"torchvision does not load, and so deepinv does not:\n{said}", file=sys.stderr)


if __name__ == "__main__":
    main()
