"""README and docs are true: every code block runs, and prints what its page shows.

A block is Python, or a console with commands after `$`. Its title says how it runs:

    ```python                                  in one process
    ```python title="4 workers"                on so many workers
    ```python title="any number of workers"    on every number of workers that the page names
    ```python title="first.py"                 by a command in a console block of its page
    ```text title="output"                     what the block before it prints, worker by worker

Blocks of a page that run on the same number of workers share their names, as cells of a notebook
do. In an output, `...` stands for anything. A block that prints what is not shown fails too. Only
blocks after a comment `<!-- not run -->` are not run.

A command `python x.py` or `tessel run -n 4 x.py` is run by the workers of the pool, as the main
program that it is: to start processes takes seconds for each. So `tessel doctor` and such are run
in a fork. Those of scripts that start workers or end them, and all others, are run by a shell:
`tessel run` is among them.
"""

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import pytest

import tessel
from scripts import main_program, python
from tessel.tensor import table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMIT = 90.0

FENCE = re.compile(r'```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?')
ANY = "any number of workers"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `shown` is the output that the page shows after it."""

    page: str
    line: int
    language: str
    title: str
    source: str
    is_run: bool
    shown: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def workers(self) -> int | None:
        """On how many workers it runs; None for any number."""
        return None if self.title == ANY else int(self.title.partition(" ")[0] or 1)

    @property
    def is_python(self) -> bool:
        return self.language == "python" and self.is_run and not self.is_file

    @property
    def is_console(self) -> bool:
        return self.language == "console" and self.is_run

    @property
    def is_file(self) -> bool:
        return self.title.endswith(".py")


def blocks(path: Path) -> list[Block]:
    """The blocks of a page, each with the output that is shown after it."""
    found: list[Block] = []
    for block in fences(path):
        if block.title == "output":
            found[-1] = replace(found[-1], shown=block.source)
        else:
            found.append(block)
    return found


def fences(path: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    page = str(path.relative_to(ROOT))
    lines = iter(enumerate(path.read_text().splitlines(), start=1))
    is_run = True
    for number, line in lines:
        assert not re.match(r"\s+```", line), f"{page}:{number}: an indented block is not run"
        if line.startswith("```"):
            fence = FENCE.fullmatch(line)
            assert fence, f"{page}:{number}: {line} is not understood"
            source = "".join(f"{text}\n" for _, text in takewhile(lambda n: n[1] != "```", lines))
            yield Block(page, number, fence["language"], fence["title"] or "", source, is_run)
        is_run = line != "<!-- not run -->"


def python_cases() -> list[tuple[Path, int]]:
    """Each page with each number of workers that its blocks name."""
    numbers = {path: {b.workers for b in blocks(path) if b.is_python} - {None} for path in PAGES}
    return [(path, nprocs) for path in PAGES for nprocs in sorted(numbers[path])]


def execute(sources: list[tuple[str, int, str]]) -> list[str]:
    """Run blocks one after the other in one module; what each of them printed."""
    module = types.ModuleType("page")
    sys.modules["page"] = module
    printed = []
    with left_as_it_was():
        for page, line, source in sources:
            code = compile("\n" * line + source, page, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, module.__dict__)
            printed.append(output.getvalue())
    return printed


@contextlib.contextmanager
def left_as_it_was() -> Iterator[None]:
    """The table and the default group, after pages that enter rules and choose groups."""
    rules, plain = dict(table.RULES), set(table.PLAIN)
    try:
        yield
    finally:
        for each, before in ((table.RULES, rules), (table.PLAIN, plain)):
            each.clear()  # type: ignore[attr-defined]
            each.update(before)  # type: ignore[attr-defined]
        table.FOUND.clear()
        if tessel.distributed.is_initialized():
            tessel.distributed.destroy_process_group()


def check_output(block: Block, printed: str) -> None:
    agrees = doctest.OutputChecker().check_output(block.shown, printed, doctest.ELLIPSIS)
    assert agrees, f"{block.place} shows\n\n{block.shown}\nbut this is printed\n\n{printed}"


@pytest.mark.limit(LIMIT + 10)
@pytest.mark.parametrize(
    ("path", "nprocs"), python_cases(), ids=lambda v: v.stem if isinstance(v, Path) else str(v)
)
def test_python_blocks_print_what_is_shown(path, nprocs, run):
    todo = [b for b in blocks(path) if b.is_python and b.workers in (nprocs, None)]
    sources = [(block.page, block.line, block.source) for block in todo]
    by_worker = run(execute, sources, nprocs=nprocs, timeout=LIMIT)
    for block, printed in zip(todo, zip(*by_worker, strict=True), strict=True):
        if block.workers is not None:
            check_output(block, "".join(printed))


CONSOLE_PAGES = [path for path in PAGES if any(block.is_console for block in blocks(path))]


PLAIN = re.compile(r"(python|tessel run -n (?P<workers>\d+)) (?P<script>\w+\.py)(?P<rest>[ \w]*)")
ENDING = ("__main__", "raise ", "kill")  # in scripts that start workers, or end them


@pytest.mark.slow
@pytest.mark.limit(3 * LIMIT)
@pytest.mark.parametrize("path", CONSOLE_PAGES, ids=lambda path: path.stem)
def test_commands_print_what_is_shown(path, tmp_path, run):
    for block in blocks(path):
        if block.is_file:
            (tmp_path / block.title).write_text(block.source)
        if block.is_console:
            for command, shown in commands(block):
                plain = PLAIN.fullmatch(command)
                source = (tmp_path / plain["script"]).read_text() if plain else ""
                if re.match("tessel (?!run)", command):  # it starts no workers
                    words = command.split()
                    printed = python("-m", *words, cwd=tmp_path, timeout=LIMIT).stdout
                elif not plain or any(word in source for word in ENDING):
                    printed = shell(command, tmp_path)
                else:
                    arguments = str(tmp_path), plain["script"], *plain["rest"].split()
                    nprocs = int(plain["workers"] or 1)
                    printed = "".join(run(main_program, *arguments, nprocs=nprocs, timeout=LIMIT))
                check_output(replace(block, shown=shown), printed)


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output shown under it."""
    first, *rest = re.split(r"^\$ ", block.source, flags=re.MULTILINE)
    assert not first, f"{block.place} shows an output without its command"
    for part in rest:
        command, _, shown = part.partition("\n")
        yield command, shown


def shell(command: str, folder: Path) -> str:
    """What a command prints, in a folder, with this environment's programs."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": programs},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    return ended.stdout


def test_every_block_is_run_or_says_that_it_is_not():
    for path in PAGES:
        consoles = [block.source for block in blocks(path) if block.is_console]
        for block in blocks(path):
            known = block.language in ("python", "console") or not block.is_run
            assert known, f"{block.place}: a block of {block.language or 'no language'} is not run"
            used = not block.is_file or any(block.title in text for text in consoles)
            assert used, f"{block.place}: no command of the page uses {block.title}"


def test_links_lead_somewhere():
    for path in PAGES:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            leads = "://" in target or (path.parent / target).exists()
            assert leads, f"{path}: {target} is missing"


PAGES_OF_DOCS = [path.relative_to(ROOT / "docs") for path in PAGES if path.parent != ROOT]
LISTS = {
    "README.md": lambda page: f"](docs/{page})",
    "docs/index.md": lambda page: f"]({page})",
    "mkdocs.yml": lambda page: f": {page}\n",
}


def test_every_page_is_listed():
    """In the README, on the first page and in the navigation."""
    for where, entry in LISTS.items():
        text = (ROOT / where).read_text()
        pages = [page for page in PAGES_OF_DOCS if where != f"docs/{page}"]
        missing = [str(page) for page in pages if entry(page.as_posix()) not in text]
        assert not missing, f"{where} does not list {missing}"


def test_the_navigation_leads_to_pages():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    for page in re.findall(r": (\S+\.md)$", nav, re.MULTILINE):
        assert (ROOT / "docs" / page).exists(), f"{page} is missing"


def test_the_reference_names_everything_that_is_public():
    """Those of `tessel`, its layers and its checks by this name, others by that of any package."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    imaging = tessel.imaging, tessel.imaging.parts, tessel.imaging.solvers
    others = tessel.operators, tessel.distributed, tessel.data, tessel.interop, tessel.models
    for module in (tessel, tessel.nn, tessel.testing, *imaging, *others):
        package = "tessel" if module in others else module.__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and not isinstance(value, types.ModuleType):
                entry = rf"^::: {package}\.(\w+\.)*{name}$"
                assert re.search(entry, reference, re.MULTILINE), f"{name} is not documented"


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
SOURCE = ROOT / "src" / "tessel"


def test_the_architecture_names_files_that_exist():
    """By their path in the package, in the checkout, or beside one that was just named."""
    ends = [path.as_posix() for folder in (SOURCE, ROOT / "tests") for path in folder.rglob("*.py")]
    for name in set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE)):
        assert any(end.endswith(f"/{name}") for end in ends), f"{name} is missing"


def test_the_architecture_names_classes_that_exist():
    classes = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"^class _?(\w+)", path.read_text(), re.MULTILINE)
    }
    rows = re.findall(r"^\|(.*?)\|", ARCHITECTURE.partition("### Classes")[2], re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([A-Z]\w+)`", row)}
    assert len(names) > 50
    assert names <= classes, f"no classes: {names - classes}"


def test_the_map_has_every_package_and_the_kernel():
    told = re.findall(r"`(\w+)`", ARCHITECTURE.partition("## The map")[2].partition("## Inv")[0])
    paths = [*SOURCE.iterdir(), *(SOURCE / "core").glob("*.py")]
    assert {path.stem for path in paths if path.stem[0] not in "_."} - {"py"} <= {*told}


def test_the_glossary_has_every_class_that_is_not_public():
    """Those of the reference are explained there."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    told = {*re.findall(r"`_?(\w+)`", ARCHITECTURE.partition("## Glossary")[2])}
    public = {*re.findall(r"^::: tessel[\w.]*\.(\w+)$", reference, re.MULTILINE)}
    for path in set(SOURCE.rglob("*.py")) - set((SOURCE / "examples").rglob("*.py")):
        for name in re.findall(r"^ *class _?(\w+)[\[(:]", path.read_text(), re.MULTILINE):
            assert name in told | public, f"{name} of {path} is not in the glossary"
