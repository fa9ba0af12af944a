"""Sanitizers over the engine: silent, and not silent if there is a mistake in it."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

sanitize = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tools/sanitize.py")))

pytestmark = pytest.mark.slow
has_threads = pytest.mark.skipif(
    not sanitize.has("-fsanitize=thread"), reason="no ThreadSanitizer here"
)
# what is wrong in the engine, and what the sanitizer says of it
MISTAKES = {
    "address": (
        "case COPIES: memcpy(to, from, bytes); break;",
        "case COPIES: memcpy(to, from, bytes + 64); break;",
        "heap-buffer-overflow",
    ),
    "undefined": (
        "static long run(const word *program, char *y, const char *x, word call) {\n",
        "static long run(const word *program, char *y, const char *x, word call) {\n"
        "    spent[0] = ((word)1 << 62) * (2 + program[NUM_GIVES]);\n",
        "signed integer overflow",
    ),
}


@has_threads
def test_workers_as_threads_race_nowhere(tmp_path: Path) -> None:
    program = sanitize.build_threads(target=tmp_path / "threads")
    for case in sanitize.THREADS:
        assert sanitize.run_threads(program, *case).endswith("right")


@has_threads
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


@pytest.mark.limit(600)
@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("is_right", [True, False])
def test_the_sanitizers_of_memory_and_numbers(tmp_path: Path, name: str, is_right: bool) -> None:
    if not sanitize.has(sanitize.SANITIZERS[name][0]):
        pytest.skip(f"the compiler does not have the sanitizer {name}")
    text, engine = (sanitize.SOURCE / "engine.c").read_text(), tmp_path / "engine.c"
    right, wrong, said = MISTAKES[name]
    assert text.count(right) == 1
    engine.write_text(text if is_right else text.replace(right, wrong))
    few = ["tests/transport/test_engine.py", "-x", "-k", "finishes_a_sum_of_a_few"]
    done = sanitize.run_tests(name, few, engine, tmp_path)
    assert (done.returncode == 0) == is_right, done.stdout
    assert (said in done.stdout) != is_right, done.stdout
