"""Sanitizers over the engine: silent, and not silent if there is a mistake in it.

Tests `transport/constants.py`.
"""

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
        "static long run(const word *program, char *y, const char *x, word call, char *room) {\n",
        "static long run(const word *program, char *y, const char *x, word call, char *room) {\n"
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
        "    head[IS_OFFERED] = entry[DIRECT] && name(",
    )
    assert text.count(publish) == text.count(write) == 1
    changed = tmp_path / "changed.c"
    changed.write_text(text.replace(publish, "").replace(write, publish + write))
    program = sanitize.build_threads(changed, tmp_path / "threads")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        sanitize.run_threads(program, 2, 2000, 1024, "slots")
    assert "data race" in caught.value.stderr


@has_threads
def test_a_block_that_is_offered_before_it_is_written_is_reported(tmp_path: Path) -> None:
    text = (sanitize.SOURCE / "engine.c").read_text()
    offer, write = (
        "        __atomic_store_n(one->counts + OFFERED, ++one->next, __ATOMIC_RELEASE);\n",
        "        if (is_past_cache(one->entry)) {\n",
    )
    assert text.count(offer) == text.count(write) == 1
    changed = tmp_path / "changed.c"
    changed.write_text(text.replace(offer, "").replace(write, offer + write))
    program = sanitize.build_threads(changed, tmp_path / "threads")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        sanitize.run_threads(program, 2, 300, 40 * 2**16, "one way direct")
    assert caught.value.returncode == 3 or "data race" in caught.value.stderr


HERE = [name for name, options in sanitize.SANITIZERS.items() if sanitize.has(options[0])]
# In one interpreter, which workers are forks of: to start one takes long with these sanitizers. The
# second sum is one that the engine of the first worker leaves to Python.
PROGRAM = """
import time, torch, tessel

def work():
    P = tessel.world()
    P.group.sum(torch.ones(2))
    time.sleep(0.3 * P.rank)
    rows, columns = (P.create_cartesian_topology_partition(each) for each in ([2, 1], [1, 2]))
    y = tessel.nn.Repartition(rows, columns)(torch.ones(3, 4))
    return float(P.group.sum(torch.ones(2)).sum()), tuple(y.shape)

assert tessel.launch(lambda: work(), 2, timeout=300) == [(4.0, (6, 2))] * 2
"""
FEW = ("-c", PROGRAM)


@pytest.mark.limit(600)
@pytest.mark.skipif(not HERE, reason="the compiler has no sanitizers of memory and of numbers")
def test_the_sanitizers_of_memory_and_numbers_are_silent(tmp_path: Path) -> None:
    done = sanitize.run_python(HERE, FEW, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert not any(said in done.stdout for _, _, said in MISTAKES.values()), done.stdout


@pytest.mark.limit(600)
@pytest.mark.skipif(not HERE, reason="the compiler has no sanitizers of memory and of numbers")
def test_mistakes_of_memory_and_numbers_are_reported(tmp_path: Path) -> None:
    """In one run: after a number that overflows it goes on, to what is read beyond its end."""
    text, engine = (sanitize.SOURCE / "engine.c").read_text(), tmp_path / "engine.c"
    for name in HERE:
        right, wrong, _ = MISTAKES[name]
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    engine.write_text(text)
    more = ["-fsanitize-recover=undefined"] if "undefined" in HERE else []
    done = sanitize.run_python(HERE, FEW, engine, tmp_path, more)
    assert done.returncode, done.stdout
    for name in HERE:
        assert MISTAKES[name][-1] in done.stdout, done.stdout
