"""What the benchmarks share: options, contestants in processes of their own, facts, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUIET_LOAD = 0.5
"""Load average up to which a machine counts as idle."""

_ASK_VERSIONS = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


class BenchmarkError(RuntimeError):
    """A contestant's process failed."""


@dataclass(frozen=True)
class Contestant:
    """One line of a comparison."""

    label: str
    package: str
    """Distribution that must be installed."""
    peer: bool = True
    """Runs under --peer-python instead of this interpreter."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save facts and results there")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        type=_interpreter,
        metavar="PATH",
        help="interpreter that has the peers installed (default: this one)",
    )
    parser.add_argument(
        "--one-cpu",
        action="store_true",
        help="confine every contestant to one CPU, on top of its own one-thread setting",
    )
    parser.add_argument(
        "--ours-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override of msrl_accel's configuration, such as runtime.threads=2; repeatable",
    )
    parser.add_argument("--contestant", help=argparse.SUPPRESS)  # set in child processes only
    return parser


def ours_set_options(args: argparse.Namespace, option: str = "--ours-set") -> list[str]:
    """The overrides as options for a child process."""
    return [word for assignment in args.ours_set for word in (option, assignment)]


def untuned_config(env: str, n_envs: int, args: argparse.Namespace, **ppo: int) -> Any:
    """msrl_accel's PPO configuration: defaults, the given `ppo` fields, then `--ours-set`."""
    from msrl_accel.config import build_parser, config_from_args

    words = ["--algo", "ppo", "--env", env, "--no-tuned", "--n-envs", str(n_envs)]
    words += ["--total-steps", str(10**9)]
    for field, value in ppo.items():
        words += ["--set", f"ppo.{field}={value}"]
    words += ours_set_options(args, "--set")
    return config_from_args(build_parser().parse_args(words))


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def installed_versions(python: str, packages: Sequence[str]) -> dict[str, str | None]:
    """Version of each distribution under an interpreter, None where it is missing."""
    command = [python, "-c", _ASK_VERSIONS, *packages]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--peer-python {python} does not run: {error}") from error
    found: dict[str, str | None] = json.loads(answer.stdout)
    return found


def present(contestants: Mapping[str, Contestant], peer_python: str) -> dict[str, Contestant]:
    """The contestants that are installed; says which are left out and how to add them."""
    kept = {}
    for name, contestant in contestants.items():
        python = peer_python if contestant.peer else sys.executable
        if installed_versions(python, [contestant.package])[contestant.package] is None:
            print(
                f"{contestant.label} is left out, it is not installed: "
                f"{python} -m pip install {contestant.package}"
            )
        else:
            kept[name] = contestant
    return kept


def begin(args: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """Print and return the facts a result depends on; applies --one-cpu to this process tree."""
    if args.one_cpu:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "ours_set": args.ours_set,
        "versions": {
            **installed_versions(args.peer_python, packages),
            **_without_none(installed_versions(sys.executable, ["msrl_accel", "mindspore"])),
        },
    }
    versions = ", ".join(f"{name} {v or 'none'}" for name, v in facts["versions"].items())
    print(f"{facts['cpu']}, {facts['cores_used']} of {facts['cores']} cores, {facts['system']}")
    print(f"Python {facts['python']}, {versions}")
    if args.ours_set:
        print(f"msrl_accel with {', '.join(args.ours_set)}")
    if facts["load_before"] > QUIET_LOAD:
        print(f"Load average {facts['load_before']:.2f}: other work on this machine distorts times")
    print(flush=True)
    return facts


def finish(args: argparse.Namespace, facts: dict[str, Any], results: Any) -> None:
    """Save what `--json` asks for."""
    if args.json is not None:
        args.json.write_text(json.dumps({"facts": facts, "results": results}, indent=2) + "\n")
        print(f"\nsaved {args.json}")


def run_child(python: str, script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script and read the JSON object it prints last.

    Raises:
        BenchmarkError: it failed; the message ends with its last lines.
    """
    done = subprocess.run([python, script, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(arguments)} failed:\n{last_lines(done.stderr)}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def last_lines(text: str, count: int = 15) -> str:
    return "\n".join(text.splitlines()[-count:])


def median_and_range(values: Sequence[float], digits: int = 0) -> str:
    """'median (min-max)'."""
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:]))]
        ).rstrip()
        for line in lines
    )


def _interpreter(text: str) -> str:
    """Absolute, since contestants may run in another folder; a link into a venv stays a link."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not an executable")
    return os.path.abspath(found)


def _without_none(versions: Mapping[str, str | None]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if version is not None}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
