"""ThreadSanitizer over the engine: silent, and not silent if slots are published too early."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

sanitize = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tools/sanitize.py")))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sanitize.has("-fsanitize=thread"), reason="no ThreadSanitizer here"),
]


def test_workers_as_threads_race_nowhere(tmp_path: Path) -> None:
    program = sanitize.build_threads(target=tmp_path / "threads")
    for case in sanitize.THREADS:
        assert sanitize.run_threads(program, *case).endswith("right")


def test_a_slot_that_is_published_before_it_is_written_is_reported(tmp_path: Path) -> None:
    text = (sanitize.SOURCE / "engine.c").read_text()
    publish, write = (
        "    publish(entry, filled(entry));\n",
        "    if (entry[DIRECT]) write_rendezvous(",
    )
    assert text.count(publish) == text.count(write) == 1
    changed = tmp_path / "changed.c"
    changed.write_text(text.replace(publish, "").replace(write, publish + write))
    program = sanitize.build_threads(changed, tmp_path / "threads")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        sanitize.run_threads(program, 2, 2000, 1024, "slots")
    assert "data race" in caught.value.stderr
