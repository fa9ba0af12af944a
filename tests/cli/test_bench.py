"""The harness of the benchmarks, and `tessel bench`.

Tests `cli/bench.py`.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tessel
from tessel.cli import bench
from tessel.cli import main as run_tessel

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # behind tests/common, which has modules of the same names

from allocator import KEEP  # noqa: E402
from harness import clock, machine, report  # noqa: E402
from harness.claim import Case, Claim, Turn, measure  # noqa: E402
from harness.contenders import BUILD, UnderMpi  # noqa: E402
from harness.results import CaseResult, Result  # noqa: E402
from harness.samples import Comparison, Summary, overall, percentile  # noqa: E402
from neighbours import Neighbourhood  # noqa: E402

from scripts import python  # noqa: E402

# --- samples


@pytest.mark.parametrize("share, expected", [(0.0, 1), (0.05, 1.2), (0.5, 3), (0.9, 4.6), (1.0, 5)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile([5, 3, 1, 4, 2], share) == pytest.approx(expected)


def test_percentile_of_one_sample() -> None:
    assert percentile([7.0], 0.05) == percentile([7.0], 0.5) == 7.0


def test_summary() -> None:
    found = Summary.of([float(n) for n in range(101)])
    assert (found.p5, found.median, found.count) == (5.0, 50.0, 101)


@pytest.mark.parametrize(
    "p5, median, aim, expected",
    [
        (0.5, 0.6, 0.65, "met"),
        (0.65, 0.65, 0.65, "met"),
        (0.5, 0.7, 0.65, "noisy"),
        (0.7, 0.5, 0.65, "noisy"),
        (0.7, 0.8, 0.65, "missed"),
        (9.0, 9.0, None, "reported"),
    ],
)
def test_verdict_needs_both(p5: float, median: float, aim: float | None, expected: str) -> None:
    assert Comparison("peer", p5, median, aim).verdict == expected


def test_ratio_is_tessel_over_peer() -> None:
    mine, other = Summary(1.0, 3.0, 9), Summary(4.0, 6.0, 9)
    found = Comparison.of(mine, "peer", other, 0.5)
    assert (found.p5, found.median, found.verdict) == (0.25, 0.5, "met")


def test_ratio_to_nothing() -> None:
    none = Summary(0.0, 0.0, 1)
    assert Comparison.of(none, "peer", none, 1.0).verdict == "met"
    assert Comparison.of(Summary(1.0, 1.0, 1), "peer", none, 1.0).verdict == "missed"


@pytest.mark.parametrize(
    "verdicts, expected",
    [
        (["met", "met", "reported"], "met"),
        (["met", "noisy"], "noisy"),
        (["noisy", "missed", "met"], "missed"),
        (["reported"], "reported"),
        ([], "reported"),
    ],
)
def test_overall(verdicts: list[str], expected: str) -> None:
    assert overall(verdicts) == expected


# --- results


def result_of(*comparisons: Comparison) -> Result:
    summaries = {"Tessel": Summary(1e-3, 2e-3, 8)}
    summaries |= {each.peer: Summary(2e-3, 2.5e-3, 8) for each in comparisons}
    parts = {"Tessel": dict.fromkeys(clock.PARTS, 1e-4)}
    case = CaseResult("small", 2, {"n": 3}, "s", summaries, parts, comparisons, 0.125)
    about = dict.fromkeys(
        ("processor", "cores", "memory", "kernel", "torch", "MPI", "date", "commit"), "some"
    )
    return Result("fake", "a fake claim", "a note", about, 3, 1.5, 0.25, (case,))


def test_json_round_trip(tmp_path: Path) -> None:
    result = result_of(Comparison("peer", 0.5, 0.8, 1.0), Comparison("other", 2.0, 2.0))
    path = result.save(tmp_path / "new")
    assert path.name == "fake.json"
    assert Result.load(path) == result
    saved = json.loads(path.read_text())
    assert saved["verdict"] == "met"
    verdicts = [each["verdict"] for each in saved["cases"][0]["comparisons"]]
    assert verdicts == ["met", "reported"]


def test_picture_and_tables(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = result_of(Comparison("peer", 0.5, 0.8, 1.0), Comparison("other", 2.0, 3.0, 1.0))
    path = report.picture(result, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    ratios, parts = report.tables(result)
    assert ratios.row_count == 2 and parts.row_count == 1
    assert "missed" in report.summary(result) and "25 %" in report.summary(result)


@pytest.mark.parametrize(
    "value, unit, expected",
    [
        (2.5e-6, "s", "2.5 µs"),
        (0.004, "s", "4 ms"),
        (3.0, "s", "3 s"),
        (3 * 2.0**20, "bytes", "3 MiB"),
        (100, "bytes", "100 B"),
        (7, "messages", "7 messages"),
    ],
)
def test_quantities(value: float, unit: str, expected: str) -> None:
    assert report.quantity(value, unit) == expected


@pytest.mark.parametrize("value, expected", [(1.234, "1.23"), (0.1, "0.10"), (0.0042, "0.0042")])
def test_ratios(value: float, expected: str) -> None:
    assert report.ratio(value) == expected


# --- turns


class Fake:
    """A contender that takes a fixed time and writes down when it had its turn."""

    def __init__(self, name: str, sample: float, diary: list[tuple[str, int]]) -> None:
        self.name, self.sample, self.diary = name, sample, diary
        self.is_closed = False

    def covers(self, case: Case) -> bool:
        return case.name != "without me" or self.name == "Tessel"

    def missing(self) -> str | None:
        return None

    def turn(self, case: Case, repeats: int) -> Turn:
        self.diary.append((self.name, repeats))
        return Turn([self.sample] * repeats, {"compute": self.sample})

    def leave(self, case: Case) -> None:
        self.diary.append((self.name, 0))

    def close(self) -> None:
        self.is_closed = True


def test_turns_are_interleaved_in_rotation() -> None:
    diary: list[tuple[str, int]] = []
    contenders = [Fake("Tessel", 0.01, diary), Fake("quick", 0.005, diary), Fake("slow", 1, diary)]
    case = Case("case", 2, aims={"slow": 0.5, "quick": 1.0}, seconds=0.1, most=15)
    result = measure(Claim("fake", "", [case], contenders), 3)
    warm_up = [("Tessel", 1), ("Tessel", 2), ("quick", 1), ("quick", 2), ("slow", 1)]
    rounds = [("Tessel", 10), ("quick", 15), ("slow", 1)]  # what fits the turn, at most 15
    expected = warm_up + rounds + rounds[1:] + rounds[:1] + rounds[2:] + rounds[:2]
    assert diary[: len(expected)] == expected
    assert sorted(diary[len(expected) :]) == [("Tessel", 0), ("quick", 0), ("slow", 0)]
    (found,) = result.cases
    assert {name: each.count for name, each in found.summaries.items()} == {
        "Tessel": 30,
        "quick": 45,
        "slow": 3,
    }
    assert {each.peer: each.verdict for each in found.comparisons} == {
        "quick": "missed",
        "slow": "met",
    }
    assert found.parts["Tessel"] == {"compute": 0.01}
    assert result.verdict == "missed" and all(each.is_closed for each in contenders)


def test_calls_share_a_turn_and_peers_may_stay_away() -> None:
    diary: list[tuple[str, int]] = []
    contenders = [Fake("Tessel", 0.01, diary), Fake("peer", 0.01, diary)]
    case = Case("without me", 2, aims={"peer": 1.0}, calls=5, seconds=0.1)
    (found,) = measure(Claim("fake", "", [case], contenders), 1).cases
    assert ("Tessel", 2) in diary and found.summaries["Tessel"].count == 2
    assert found.comparisons == () and "peer" not in dict(diary)


def test_what_is_counted_has_its_own_number_of_rounds() -> None:
    diary: list[tuple[str, int]] = []
    case = Case("counted", 2, unit="bytes", most=1, rounds=1)
    measure(Claim("fake", "", [case], [Fake("Tessel", 4096, diary)]), 5)
    assert diary == [("Tessel", 1), ("Tessel", 0)]


def test_contenders_are_closed_after_a_failure() -> None:
    class Broken(Fake):
        def turn(self, case: Case, repeats: int) -> Turn:
            raise RuntimeError("broken")

    contenders = [Fake("Tessel", 1, []), Broken("peer", 1, [])]
    with pytest.raises(RuntimeError, match="broken"):
        measure(Claim("fake", "", [Case("case", 2)], contenders), 1)
    assert all(each.is_closed for each in contenders)


# --- the machine


def test_share_of_others() -> None:
    cores = os.cpu_count() or 1
    before = machine.Usage(clock=10.0, busy=100.0, own=5.0)
    after = machine.Usage(clock=12.0, busy=100.0 + 1.5 * cores, own=5.0 + 0.5 * cores)
    assert after.others_since(before) == pytest.approx(0.5)
    quiet = machine.Usage(clock=12.0, busy=100.0, own=5.1)  # clocks of the system are coarse
    assert quiet.others_since(before) == 0.0


def test_own_time_includes_ended_children() -> None:
    before = machine.Usage.now()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert machine.Usage.now().own - before.own >= 0.25


def test_machine_is_described() -> None:
    found = machine.description()
    assert found["torch"] == torch.__version__ and int(found["cores"]) >= 1
    assert all(found[each] for each in ("date", "commit", "processor", "memory", "kernel", "MPI"))


# --- the clock


def spend() -> tuple[dict[str, float], float]:
    P = tessel.world()
    rows, columns = (P.create_cartesian_topology_partition(each) for each in ([2, 1], [1, 2]))
    layer, x = tessel.nn.Repartition(rows, columns), torch.ones(4, 8)
    begin = time.perf_counter()
    with clock.clocked() as found:
        layer(x)
    return found.spent, time.perf_counter() - begin


def test_clock_sees_every_part(run: Callable[..., list[Any]]) -> None:
    for spent, elapsed in run(spend, nprocs=2):
        assert set(spent) == set(clock.PARTS)
        if tessel.transport.chosen_transport() != "gloo":
            assert all(seconds > 0 for seconds in spent.values()), spent
        assert sum(spent.values()) <= elapsed


def test_inner_parts_count_once() -> None:
    found = clock.Clock()
    pack = found.timing("pack", lambda: time.sleep(0.02))
    begin = time.perf_counter()
    found.timing("move", lambda: pack())()
    elapsed = time.perf_counter() - begin
    assert found.spent["pack"] >= 0.02
    assert found.spent["pack"] + found.spent["move"] <= elapsed


def test_clock_puts_functions_back() -> None:
    before = [owner.__dict__[name] for owner, name, _ in clock._TARGETS]
    with pytest.raises(ValueError, match="stop"), clock.clocked():
        raise ValueError("stop")
    assert before == [owner.__dict__[name] for owner, name, _ in clock._TARGETS]


# --- a claim from end to end

PEER = """
import json, sys
from pathlib import Path

folder, *rest = sys.argv[1:]
assert rest == ["well"]
print("a library says hello", flush=True)
with (Path(folder) / "0").open() as commands:
    for line in commands:
        if not line.strip():
            break
        asked = json.loads(line)
        if asked["settings"]["n"] > 50:
            sys.exit("no such size")
        samples = [1000.0] * asked["repeats"]
        print(json.dumps({"samples": samples, "parts": {"local": 0.5}}), flush=True)
"""

CLAIM = """
import sys
from pathlib import Path

import torch
from harness.claim import Case, Claim
from harness.command import main
from harness.contenders import Counted, InOneProcess, OnWorkers, UnderMpi

import tessel


class Peer(UnderMpi):
    @property
    def python(self):
        return Path(sys.prefix) / "bin" / "python"


def by_tessel(settings):
    reduce, x = tessel.nn.AllSumReduce(tessel.world(), [0]), torch.ones(settings["n"])
    assert reduce(x).tolist() == [2.0] * settings["n"]
    return lambda: reduce(x)


def alone(settings):
    assert tessel.world().size == 1 and torch.get_num_threads() == 1
    return lambda: torch.ones(settings["n"]).sum()


def count(settings):
    return settings["n"] * (1 + tessel.world().rank)


def is_timed(case):
    return case.unit == "s"


def is_counted(case):
    return case.unit == "bytes"


cases = [
    Case("timed", 2, {"n": N}, {"peer": 1.0}, calls=2),
    Case("counted", 2, {"n": 8}, unit="bytes", most=1, rounds=1),
]
claim = Claim(
    "fake",
    "a fake claim",
    cases,
    [
        OnWorkers("Tessel", by_tessel, split=True, covers=is_timed),
        Peer("peer", str(Path(__file__).parent / "peer.py"), covers=is_timed, arguments=("well",)),
        InOneProcess("alone", alone, threads=1, covers=is_timed),
        Counted("Tessel", "fake", "count", covers=is_counted),
    ],
)
if __name__ == "__main__":
    main(claim, "A fake claim.")
"""

MPIRUN = """#!/bin/sh
while [ "$1" != "-n" ]; do shift; done
shift 2
exec "$@"
"""


def run_claim(
    folder: Path, n: int, *options: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the claim above with a peer that "mpirun" starts as one process."""
    (folder / "peer.py").write_text(PEER)
    (folder / "fake.py").write_text(CLAIM.replace("N}", f"{n}}}"))
    mpirun = folder / "mpirun"
    mpirun.write_text(MPIRUN)
    mpirun.chmod(mpirun.stat().st_mode | stat.S_IXUSR)
    places = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder), str(BENCHMARKS), *sys.path]),
    }
    command = [str(folder / "fake.py"), "--output", str(folder / "out"), *options]
    env = {**os.environ, **places, **(variables or KEEP)}
    if not variables:
        return python(*command, env=env, timeout=200)
    # with others than `KEEP` it starts again, which a fork cannot
    again = [sys.executable, *command]
    return subprocess.run(again, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.limit(220)  # several interpreters import torch
def test_claim_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run_claim(tmp_path, 3, "--quick")
    assert done.returncode == 0, done.stderr
    result = Result.load(tmp_path / "out" / "fake.json")
    timed, counted = result.cases
    assert result.rounds == 2 and "fake" in done.stdout
    assert set(timed.summaries) == {"Tessel", "peer", "alone"}
    assert timed.summaries["peer"].median == 1000.0
    assert set(timed.parts["Tessel"]) == set(clock.PARTS)
    assert timed.parts["peer"] == {"local": 0.5}
    assert counted.summaries["Tessel"] == Summary(16.0, 16.0, 1)  # the larger of two workers
    verdicts = {each.peer: each.verdict for case in result.cases for each in case.comparisons}
    assert verdicts == {"peer": "met", "alone": "reported"} and result.verdict == "met"
    assert (tmp_path / "out" / "fake.png").read_bytes().startswith(b"\x89PNG")
    assert all(f"{name}={value}" in result.machine["allocator"] for name, value in KEEP.items())


@pytest.mark.slow
@pytest.mark.limit(220)
def test_peer_that_fails_says_why(tmp_path: Path) -> None:
    done = run_claim(tmp_path, 99, "--quick", "--only", "timed")
    assert done.returncode != 0
    assert "peer gave no answer in 'timed'" in done.stderr and "no such size" in done.stderr
    assert not (tmp_path / "out" / "fake.json").exists()


@pytest.mark.slow
@pytest.mark.limit(220)
def test_no_case_is_left(tmp_path: Path) -> None:
    other = {"MALLOC_TRIM_THRESHOLD_": "4096"}
    done = run_claim(tmp_path, 3, "--only", "nothing of this name", variables=other)
    assert done.returncode == 2 and "no case" in done.stdout


def test_peer_that_is_not_installed() -> None:
    missing = UnderMpi("peer", "peer.py", "no such venv").missing()
    assert missing is not None and "setup_peers.sh" in missing


@pytest.mark.skipif(not (BUILD / "mpi" / "bin" / "python").exists(), reason="no MPI is set up")
def test_real_processes_under_mpi() -> None:
    peer = UnderMpi("mpi4py", "movements_mpi.py")
    case = Case("halo exchange", 2, {"movement": "halo exchange", "kib": 1})
    try:
        assert len(peer.turn(case, 3).samples) == 3
        other = Case("broadcast", 2, {"movement": "broadcast", "kib": 1})
        assert all(sample > 0 for sample in peer.turn(other, 2).samples)
        with pytest.raises(RuntimeError, match="KeyError"):
            peer.turn(Case("unknown", 2, {"movement": "unknown", "kib": 1}), 1)
    finally:
        peer.close()


# --- what contenders share


@pytest.mark.parametrize("grid, halo", [((1, 3), (0, 1)), ((2, 2), (1, 1)), ((3, 2), (2, 1))])
def test_neighbours_fill_the_border(grid: tuple[int, ...], halo: tuple[int, ...]) -> None:
    shape = (4, 5)
    index = torch.arange(grid[0] * shape[0] * grid[1] * shape[1])
    whole = index.view(grid[0] * shape[0], grid[1] * shape[1])
    places = [Neighbourhood(grid, shape, halo, rank) for rank in range(grid[0] * grid[1])]
    blocks = [whole[tuple(slice(*each) for each in here.bounds)][here.inner] for here in places]
    for here in places:
        y = torch.full(here.grown, -1)
        y[here.inner] = blocks[here.rank]
        for rank, _, arrives in here.messages():
            back = {other: leaves for other, leaves, _ in places[rank].messages()}
            y[arrives] = blocks[rank][back[here.rank]]
        assert torch.equal(y, whole[tuple(slice(*each) for each in here.bounds)])
    assert [place.coordinates for place in places] == list(product(*map(range, grid)))


# --- the command


def test_every_claim_has_its_script() -> None:
    claims = bench.find_claims(BENCHMARKS)
    assert len(claims) == 10
    assert [claim.name for claim in claims if not claim.script.is_file()] == []


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tessel(["bench", "--list", "halo", "movements", "halo"]) == 0
    said = capsys.readouterr().out
    assert "halo" in said and "movements" in said and "imaging" not in said


def test_unknown_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tessel(["bench", "halo", "hello"]) == 2
    said = capsys.readouterr().err
    assert "unknown claim hello" in said and "movements" in said


def test_no_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tessel(["bench", "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err


def test_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_PACKAGE", tmp_path / "lib" / "python" / "tessel")
    monkeypatch.chdir(tmp_path)
    assert run_tessel(["bench"]) == 2
    assert "checkout" in capsys.readouterr().err


def test_summary_of_all_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "claims.toml").write_text(
        '[good]\nsays = "it is good"\naim = "≤ 1"\n[broken]\nsays = "it breaks"\naim = "none"\n'
    )
    saved = result_of(Comparison("peer", 0.5, 0.8, 1.0), Comparison("other", 2.0, 3.0)).to_json()
    (folder / "good.py").write_text(
        "import sys; from pathlib import Path\n"
        "assert sys.argv[1:4] == ['--rounds', '2', '--output']\n"
        f"Path(sys.argv[4], 'good.json').write_text({saved!r})"
    )
    (folder / "broken.py").write_text("raise SystemExit(3)")
    (folder / "results").mkdir()
    (folder / "results" / "broken.json").write_text(saved)  # of an earlier run
    inner = tmp_path / "src"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert run_tessel(["bench", "--rounds", "2", "good"]) == 0
    assert run_tessel(["bench", "--rounds", "2"]) == 1
    said = capsys.readouterr()
    assert "1 of 1" in said.out and "0.80 (≤ 1)" in said.out and "25 %" in said.out
    assert "failed" in said.out and "broken ended with exit code 3" in said.err
    assert (folder / "results" / "broken.json").read_text() == saved
