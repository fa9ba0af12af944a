"""Run a function of a script on fresh workers and print what each returns, as JSON.

python -m harness.count MODULE FUNCTION SETTINGS WORKERS
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

import tessel


def main() -> None:
    module, function, settings, workers = sys.argv[1:]
    count = getattr(import_module(module), function)
    print(json.dumps(tessel.launch(count, int(workers), json.loads(settings), threads=1)))


if __name__ == "__main__":
    main()
