"""Examine this machine: its resources, the speed of movements, and problems.

Two local workers measure each movement: the time of a small message (latency) and the rate of a
large one (bandwidth). The list at the end tells what to fix and how. The exit code is 1 if
something is broken and 0 otherwise, even if there is advice.

`--measure` also measures how fast workers compute and exchange data here, some seconds for each of
several numbers of workers, and stores this machine model in a file, by which `tessel plan` and
`best_partition` predict times. Under a launcher it measures the job that was started, between hosts
and within them, and the first worker writes the file:

  srun --nodes 2 --ntasks-per-node 40 tessel doctor --measure --output cluster.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tessel import transport
from tessel.cli.checks import Finding, check_rates, examine
from tessel.cli.facts import Facts
from tessel.cli.measure import Rate, measure_job, measure_machine, measure_rates
from tessel.operators.rates import Machine, known_machine, model_path
from tessel.operators.units import num_bytes, num_flops, num_seconds, table_of_numbers

SUMMARY = "show what this machine has, measure it, and say what to fix"

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tessel doctor`."""
    parser.add_argument(
        "--no-measure", action="store_true", help="don't start workers to measure movements"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measure the machine model of `tessel plan`, and store it in a file",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where --measure stores the model (default: as usual)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(args: argparse.Namespace) -> int:
    """Examine, measure and print; return 1 if something is broken."""
    if args.output and not args.measure:
        print("tessel doctor: --output says where --measure stores its model", file=sys.stderr)
        return 2
    if args.measure and transport.launched_as() is not None:
        return measure_this_job(args)
    facts = Facts()
    findings = examine(facts)
    rates: list[Rate] = []
    on_gpus: dict[str, list[Rate]] = {}
    # If workers cannot communicate, measuring would only wait for them.
    if not args.no_measure and not any(finding.broken for finding in findings):
        rates, on_gpus, more = measured(quiet=args.json, gpus=len(facts.devices))
        findings += more
    if args.measure and not any(finding.broken for finding in findings):
        # Progress goes to stderr, so that the output can be redirected to a file.
        console = Console(stderr=True, quiet=args.json)
        with console.status("measuring how fast workers compute and exchange data …"):
            path = measure_machine().save(args.output)
        console.print(f"the machine model is in {path}", highlight=False)
    model = None
    try:
        model = known_machine(args.output)
    except ValueError as error:
        mend = "tessel doctor --measure rewrites it"
        findings.append(Finding(False, f"the machine model cannot be read: {error}", mend))
    if args.json:
        said = {
            **{"facts": facts, "movements": rates, "movements_on_gpus": on_gpus},
            **{"machine": model, "findings": findings},
        }
        print(json.dumps(said, indent=2, default=dataclasses.asdict))
    else:
        show(facts, rates, on_gpus, model, findings)
    return int(any(finding.broken for finding in findings))


def show(
    facts: Facts,
    rates: Sequence[Rate],
    on_gpus: Mapping[str, Sequence[Rate]],
    model: Machine | None,
    findings: Sequence[Finding],
) -> None:
    """Print everything that was found."""
    console = Console(highlight=False)
    console.print("[bold]this machine[/]")
    console.print(facts_table(facts))
    if rates:
        console.print("\n[bold]movements between 2 workers of this machine[/]")
        console.print(rates_table(rates))
    for way, each in on_gpus.items():
        console.print(f"\n[bold]{way}[/]")
        console.print(rates_table(each))
    if model is not None:
        console.print("\n[bold]the machine model that predicts the times of plans[/]")
        console.print(f"  {escape(model.origin)}\n  file: {escape(str(model_path()))}")
        console.print(model_table(model))
    console.print("\n[bold]findings[/]")
    if not findings:
        console.print("  [green]nothing wrong found[/]")
    for finding in findings:
        kind = "[bold red]broken[/]" if finding.broken else "[yellow]advice[/]"
        console.print(f"  {kind}: {escape(finding.what)}\n    → {escape(finding.mend)}")


def measure_this_job(args: argparse.Namespace) -> int:
    """Measure the job that a launcher has started; the first worker writes and prints the model."""
    model = measure_job()
    if transport.this_worker() > 0:
        return 0
    path = model.save(args.output)
    if args.json:
        print(json.dumps(dataclasses.asdict(model), indent=2))
        return 0
    console = Console(highlight=False)
    console.print(f"{escape(model.origin)}\n  file: {escape(str(path))}")
    console.print(model_table(model))
    return 0


def measured(quiet: bool, gpus: int) -> tuple[list[Rate], dict[str, list[Rate]], list[Finding]]:
    """Rates of CPU tensors, those of GPU tensors by transport, and findings."""
    console, on_gpus = Console(stderr=True, quiet=quiet), {}
    try:
        with console.status("measuring on 2 workers …"):
            rates, _ = measure_rates()
            # without NCCL, as between workers that share a GPU; with it, if each can have one
            for backend in ("gloo", "cpu:gloo,cuda:nccl")[: min(gpus, 2)]:
                found, carrier = measure_rates("cuda", backend)
                on_gpus[f"tensors on GPUs, by {carrier}"] = found
    except (RuntimeError, OSError, TimeoutError) as error:
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        broken = Finding(
            True,
            f"two workers on this machine could not exchange data: {first_line}",
            "fix what is named above, then see the whole error with `tessel demo --workers 2`",
        )
        return [], {}, [broken]
    finding = check_rates(rates)
    return rates, on_gpus, [finding] if finding else []


def facts_table(facts: Facts) -> Table:
    """A table of facts, one in each line."""
    shared, free = facts.shared_memory, facts.memory_available
    threads = f"{facts.torch_threads} in torch; OMP_NUM_THREADS is "
    launcher = "none: a script is a world of one"
    if facts.launch_problem is not None:
        launcher = "a script cannot join its job, see the findings"
    lines = {
        "tessel": facts.tessel,
        "torch": facts.torch,
        "python": f"{facts.python} on {facts.system}",
        "backends": ", ".join(facts.backends) or "none",
        "GPUs": "; ".join(facts.devices) or "none, workers use the CPU",
        "cores": f"{facts.usable_cores} usable of {facts.cores}",
        "threads": threads + (facts.omp_num_threads or "not set"),
        "memory": num_bytes(facts.memory) + (f", {num_bytes(free)} available" if free else ""),
        "on one host": f"tensors move by {facts.transport}",
        "between hosts": f"CPU tensors move by {facts.between_hosts}",
        "/dev/shm": num_bytes(shared) if shared is not None else "none",
        "open files": f"{facts.open_files} per process",
        "host": f"{facts.hostname} ({facts.host_address or 'does not resolve'})",
        "interfaces": ", ".join(facts.interfaces),
        "launcher": facts.launched or launcher,
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in lines.items():
        table.add_row("  " + name, escape(value))
    return table


def rates_table(rates: Sequence[Rate]) -> Table:
    """A table of the rates of movements."""
    titles = "latency", "bandwidth", "large message"
    table = table_of_numbers("  movement", *titles, header_style="cyan")
    for rate in rates:
        table.add_row(
            "  " + rate.movement,
            f"{1e6 * rate.latency:.0f} µs",
            f"{rate.bandwidth / _GIB:.2f} GiB/s",
            num_bytes(rate.num_bytes),
        )
    return table


def model_table(model: Machine) -> Table:
    """A table of the rates of a worker, for each measured number of workers."""
    titles = "agreement", "message", "sends", "memory", "FFT", "matrices"
    table = table_of_numbers("  each of", *titles, header_style="cyan")
    for rates in model.rates:
        table.add_row(
            f"  {rates.workers} worker{'s' * (rates.workers > 1)}",
            num_seconds(rates.call),
            num_seconds(rates.latency),
            f"{rates.bandwidth / _GIB:.2f} GiB/s",
            f"{rates.memory / _GIB:.1f} GiB/s",
            f"{num_flops(rates.fft)}/s",
            f"{num_flops(rates.matrix)}/s",
        )
    if (network := model.network) is not None:
        table.add_row(
            f"  hosts of {network.workers_per_host} workers",
            "–",
            num_seconds(network.latency),
            f"{network.bandwidth / _GIB:.2f} GiB/s",
        )
    return table
