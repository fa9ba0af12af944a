"""Run the compiled engine under sanitizers: `make sanitize`.

- ThreadSanitizer sees one process only, and workers are processes. So workers are threads here
  (tools/engine_threads.c): every slot, header, semaphore and sign of sleep is used from both ends.
- UndefinedBehaviorSanitizer and AddressSanitizer are built into the extension, which then runs the
  engine's tests (tests/transport/test_engine.py) on workers that are processes.

A sanitizer that this compiler does not have is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/tessel/transport"
BUILD = ROOT / "build/sanitize"
COMPILER = os.environ.get("CC", "cc").split()
COMMON = ("-g", "-O1", "-std=gnu11", "-fno-strict-aliasing", "-fno-omit-frame-pointer")
# (workers, calls, bytes of a message, mode)
THREADS = (
    *((2, 3000, 64, "slots"), (3, 500, 1024, "slots"), (2, 300, 2**16, "direct")),
    *((2, 200, 2**15, "slots"), (3, 40, 7 * 2**16, "one way direct")),  # spread, and offered
    *((2, 3000, 64, "early slots"), (3, 500, 1024, "early slots"), (2, 300, 2**16, "early direct")),
)
SANITIZERS = {
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    "address": ("-fsanitize=address",),
}


def headers() -> list[str]:
    """The options that find Python's header and that of the constants."""
    BUILD.mkdir(parents=True, exist_ok=True)
    constants = runpy.run_path(str(SOURCE / "constants.py"))
    text = (f"enum {{ {name} = {constants[name]} }};\n" for name in constants if name.isupper())
    (BUILD / "constants.h").write_text("".join(text))
    return [f"-I{sysconfig.get_paths()['include']}", f"-I{BUILD}", f"-I{SOURCE}"]


def has(option: str) -> bool:
    """Whether the compiler can build and link with a sanitizer."""
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / "probe"
    command = [*COMPILER, option, "-x", "c", "-", "-o", str(target)]
    try:
        return not subprocess.run(
            command, input=b"int main(void) { return 0; }", capture_output=True
        ).returncode
    except FileNotFoundError:
        return False


def build_threads(engine: Path = SOURCE / "engine.c", target: Path = BUILD / "threads") -> Path:
    """Workers as threads, under ThreadSanitizer."""
    # Python's functions are never called there. GCC warns that it does not follow fences: what
    # orders memory here are semaphores, which it does follow.
    options = ("-fsanitize=thread", "-Wno-tsan", "-no-pie", "-pthread", f'-DENGINE="{engine}"')
    link = ("-Wl,--unresolved-symbols=ignore-all", "-Wl,-z,lazy")
    source = str(ROOT / "tools/engine_threads.c")
    command = [*COMPILER, *COMMON, *options, *headers(), source, "-o", str(target), *link]
    subprocess.run(command, check=True)
    return target


def run_threads(program: Path, workers: int, calls: int, num_bytes: int, mode: str) -> str:
    """What the threads and the sanitizer say; CalledProcessError if something is wrong."""
    command = [str(program), *map(str, (workers, calls, num_bytes, mode))]
    # the addresses of a process are at random places, and older versions cannot know all of them
    command = ["setarch", "-R", *command] if shutil.which("setarch") else command
    options = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = subprocess.run(
        command, env=os.environ | options, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.strip()


def library(name: str) -> str:
    """Where the compiler has a library."""
    command = [*COMPILER, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_python(
    names: Sequence[str],
    program: Sequence[str],
    engine: Path = SOURCE / "engine.c",
    folder: Path = BUILD,
    more: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """A program with sanitizers in the extension: how it ended, and what was said.

    `program` are the words after `python`, `more` are further options of the compiler.
    """
    package = folder / "-".join(names) / "tessel"
    shutil.rmtree(package.parent, ignore_errors=True)
    shutil.copytree(ROOT / "src/tessel", package, symlinks=True)
    for stale in (package / "transport").glob("engine*.so"):
        stale.unlink()
    target = package / "transport/engine.abi3.so"
    options = [*(option for name in names for option in SANITIZERS[name]), *more]
    command = [*COMPILER, *COMMON, *options, "-shared", "-fPIC", *headers()]
    subprocess.run([*command, str(engine), "-o", str(target)], check=True)
    paths = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TESSEL_ENGINE": "compiled",
    }
    if "address" in names:
        # It must be loaded before all else. It looks for C++'s `throw` when it starts, and ends the
        # process at the first exception if it was not there: Python itself does not load C++, torch
        # does so later. Python and torch keep what they have until the end, which is no leak.
        libraries = [library("libasan.so"), library("libstdc++.so.6")]
        env |= {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
        env |= {"PYTHONMALLOC": "malloc"}  # so that it knows where each of Python's objects ends
    command = [sys.executable, *program]
    return subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads-only", action="store_true", help="ThreadSanitizer alone")
    parser.add_argument("tests", nargs="*", default=["tests/transport/test_engine.py"])
    arguments = parser.parse_args()
    failed = []
    if has("-fsanitize=thread"):
        program = build_threads()
        for case in THREADS:
            try:
                print("thread:", run_threads(program, *case), flush=True)
            except subprocess.CalledProcessError as error:
                print(f"thread: {case}\n{error.stdout}{error.stderr}", flush=True)
                failed.append("thread")
    else:
        print("thread: left out, the compiler does not have it")
    names = [name for name, options in SANITIZERS.items() if has(options[0])]
    for name in SANITIZERS.keys() - names:
        print(f"{name}: left out, the compiler does not have it")
    if names and not arguments.threads_only:
        print(f"{' and '.join(names)}: the engine's tests", flush=True)
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = run_python(names, [*pytest, *arguments.tests])
        print(done.stdout, flush=True)
        if done.returncode:
            failed += names
    print(f"failed: {', '.join(failed)}" if failed else "all sanitizers are silent")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
