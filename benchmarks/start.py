"""How long workers take from the command to their first movement, against `import torch`.

In turns: a process that imports torch and ends; `tessel run -n P` of a script that sums one tensor
over all workers; and a script that calls `tessel.launch` with a function that does. Seconds are
those from the start of the command until the slowest worker has its sum; processor seconds are
those of the command and of all processes that it has waited for. The aim is about as many workers
as there are cores: with fewer cores they import torch one after the other.

    python benchmarks/start.py [--workers 1,2,4,8,16] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AIM = 1.3
SUM = """
import time
def first_movement(path):
    import tessel, torch
    P = tessel.world()
    total = tessel.nn.AllSumReduce(P, [0])(torch.ones(8))
    assert float(total[0]) == P.size
    with open(f"{path}/{P.rank or 0}", "w") as out:
        out.write(repr(time.time()))
"""
SCRIPTS = {
    "tessel run": SUM + "import sys; first_movement(sys.argv[1])\n",
    "tessel.launch": SUM
    + "if __name__ == '__main__':\n    import sys, tessel\n"
    + "    tessel.launch(first_movement, int(sys.argv[2]), sys.argv[1])\n",
    "import torch": "import sys, time, torch\n"
    "open(sys.argv[1] + '/0', 'w').write(repr(time.time()))\n",
}


def measure(name: str, workers: int, folder: Path) -> tuple[float, float]:
    """Seconds until the slowest worker has moved, and processor seconds."""
    script, stamps = folder / "script.py", folder / "stamps"
    script.write_text(SCRIPTS[name])
    stamps.mkdir(exist_ok=True)
    for old in stamps.iterdir():
        old.unlink()
    command = [sys.executable, str(script), str(stamps), str(workers)]
    if name == "tessel run":
        command = [sys.executable, "-m", "tessel", "run", "-n", str(workers), *command[1:]]
    begin = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    found = [float(each.read_text()) for each in stamps.iterdir()]
    if process.returncode or len(found) != (workers if name != "import torch" else 1):
        raise SystemExit(f"{name} on {workers} workers ended with {process.returncode}")
    return max(found) - begin, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    counts = [int(count) for count in args.workers.split(",") if int(count) <= 2 * os.cpu_count()]
    cases = [("import torch", 1), *((name, n) for n in counts for name in list(SCRIPTS)[:2])]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            for case in cases:
                sample = measure(*case, Path(folder))
                if number:  # the first round brings files into the system's cache
                    found[case].append(sample)
    alone = statistics.median(seconds for seconds, _ in found["import torch", 1])
    for (name, workers), samples in found.items():
        seconds, used = (statistics.median(column) for column in zip(*samples, strict=True))
        print(
            f"{name:13} {workers:2} workers: {seconds:6.2f} s, {seconds / alone:5.2f} of one "
            f"`import torch` (aim {AIM}); {used:6.2f} s of processors"
        )


if __name__ == "__main__":
    main()
