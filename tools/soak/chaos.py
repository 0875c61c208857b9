"""A training run whose workers are killed, stopped and made to raise, and what must still hold.

    python tools/soak/chaos.py                     # 30 minutes, a fault every 20 s on average
    python tools/soak/chaos.py --minutes 1 --every 5

Trains PPO asynchronously on CartPole-v1 (`--latency` ms a step) while a random worker gets SIGKILL,
SIGSTOP or an exception in its environment. Then ends the run by SIGTERM and checks that

- a row of metrics came at least every `--patience` seconds (no hang),
- versions follow each other without gap (none lost), and every loss is a finite number,
- the workers were replaced, as many as were harmed,
- the learner's memory stayed flat,
- the return is reached (`--target`), at the end,
- the run ended within 5 s, with a checkpoint, no process and no shared memory left.

Prints what was found, with exit status 1 if anything does not hold; `--json FILE` saves it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

FAULTS = ("kill", "stop", "raise")
END_SECONDS = 5.0
LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm")


@dataclass
class Observed:
    """What is known of a run when it has ended."""

    rows: list[dict[str, Any]]
    """Of its metrics."""
    faults: list[str] = field(default_factory=list)
    longest_gap: float = 0.0
    """Seconds between rows."""
    memory: list[float] = field(default_factory=list)
    """Resident MB of the learner, at equal intervals."""
    end_seconds: float = 0.0
    exit_status: int = 0
    checkpoint_step: int = -1
    orphans: list[int] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)


def judge(seen: Observed, patience: float, target: float, growth_mb: float) -> dict[str, str]:
    """What does not hold: name of the check -> what was found; empty where all is well."""
    wrong = {}
    rows = seen.rows
    if not rows:
        return {"training": "no update was made"}
    if seen.longest_gap > patience:
        wrong["hang"] = f"{seen.longest_gap:.0f} s without an update"
    versions = [int(row["pipeline/version"]) for row in rows]
    lost = sorted(set(range(1, versions[-1] + 1)) - set(versions))
    if lost or versions != sorted(set(versions)):
        wrong["versions"] = f"lost or repeated: {lost[:5] or versions[:5]}"
    numbers = [row.get(f"ppo/{name}", 0.0) for row in rows for name in LOSSES]
    if any(x is None or not math.isfinite(x) for x in numbers):
        wrong["numbers"] = "a loss is not finite"
    restarts = int(rows[-1]["pipeline/restarts"])
    # Those harmed last may not have been noticed yet; a worker can be harmed twice before it is.
    if not 0.6 * len(seen.faults) - 2 <= restarts <= len(seen.faults):
        wrong["restarts"] = f"{restarts} for {len(seen.faults)} faults"
    grown = growth(seen.memory)
    if grown > growth_mb:
        wrong["memory"] = f"grew by {grown:.0f} MB"
    reached = rows[-1].get("episode/return") or 0.0
    if reached < target:
        wrong["return"] = f"{reached:.0f} at the end, not {target:g}"
    if seen.end_seconds > END_SECONDS or seen.exit_status not in (130, 143):
        wrong["end"] = f"exit status {seen.exit_status} after {seen.end_seconds:.1f} s"
    if seen.checkpoint_step != rows[-1]["step"]:
        wrong["checkpoint"] = f"of step {seen.checkpoint_step}, not {rows[-1]['step']}"
    if seen.orphans:
        wrong["orphans"] = f"processes {seen.orphans}"
    if seen.segments:
        wrong["segments"] = ", ".join(seen.segments)
    return wrong


def growth(memory: Sequence[float]) -> float:
    """MB between the medians of the second and the last quarter; the first is the start."""
    quarter = len(memory) // 4
    if not quarter:
        return 0.0
    return float(np.median(memory[-quarter:]) - np.median(memory[quarter : 2 * quarter]))


class Chaos:
    """One run and its attacker.

    Args:
        args: of the command line.
        folder: for the run and the order to raise.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.run_dir = folder / "run"
        self.metrics = self.run_dir / "metrics.jsonl"
        self.read = self.updates = 0
        self.order = folder / "order"
        self.log = folder / "log.txt"
        self.random = random.Random(args.seed)
        self.seen = Observed([])

    def command(self) -> list[str]:
        kwargs = json.dumps({"order": str(self.order), "mean_ms": self.args.latency})
        words = [sys.executable, "-m", "msrl_accel.train", "--algo", "ppo", "--mode", "async"]
        words += ["--env", "chaos_env:Chaos-v0", "--run-dir", str(self.run_dir)]
        words += [
            "--n-envs",
            "32",
            "--total-steps",
            str(10**9),
            "--workers",
            str(self.args.workers),
        ]
        words += ["--envs-per-worker", "16", "--quiet"]
        values = {
            "env_kwargs": kwargs,
            "ppo.n_steps": 32,
            "ppo.batch_size": 256,
            "ppo.n_epochs": 4,
            "ppo.learning_rate": 5e-4,
            "ppo.gamma": 0.98,
            "pipeline.hang_seconds": 4,
            "pipeline.max_restarts": 10,
            "checkpoint.interval_seconds": 20,
            "logging.tensorboard": False,
        }
        return words + [w for key, value in values.items() for w in ("--set", f"{key}={value}")]

    def play(self) -> Observed:
        """Train, attack, end; returns what was seen."""
        before = segments()
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        with self.log.open("w") as log:
            learner = subprocess.Popen(
                self.command(), env=environment, stdout=log, stderr=log, start_new_session=True
            )
        process = psutil.Process(learner.pid)
        try:
            self._attack(learner, process)
            self._end(learner, process)
        finally:
            if learner.poll() is None:
                os.killpg(learner.pid, signal.SIGKILL)
        self.seen.segments = sorted(segments() - before)
        self.seen.rows = self._rows()
        return self.seen

    def _attack(self, learner: subprocess.Popen[bytes], process: psutil.Process) -> None:
        """Until the time is over, or the run is."""
        while not self._updates():  # it starts
            if learner.poll() is not None:
                raise SystemExit(f"the run did not start:\n{self.log.read_text()}")
            time.sleep(0.2)
        end = time.monotonic() + 60 * self.args.minutes
        strike = time.monotonic() + self._pause()
        rows, since = 0, time.monotonic()
        while time.monotonic() < end and learner.poll() is None:
            time.sleep(0.25)
            self.seen.memory.append(process.memory_info().rss / 2**20)
            now = self._updates()
            self.seen.longest_gap = max(self.seen.longest_gap, time.monotonic() - since)
            if now > rows:
                rows, since = now, time.monotonic()
            elif time.monotonic() - since > self.args.patience:
                return
            if time.monotonic() >= strike:
                self._strike(process)
                strike = time.monotonic() + self._pause()

    def _pause(self) -> float:
        return self.random.expovariate(1 / self.args.every)

    def _strike(self, process: psutil.Process) -> None:
        fault = self.random.choice(FAULTS)
        if fault == "raise":
            if self.order.exists():  # the last one has not been followed yet
                return
            self.order.touch()
        else:
            alive = [p for p in workers(process) if p.status() != psutil.STATUS_STOPPED]
            if not alive:
                return
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault]
            self.random.choice(alive).send_signal(number)
        self.seen.faults.append(fault)
        print(f"{time.strftime('%H:%M:%S')} {fault}", flush=True)

    def _end(self, learner: subprocess.Popen[bytes], process: psutil.Process) -> None:
        from msrl_accel.run import Run

        family = process.children(recursive=True) if learner.poll() is None else []
        collecting = workers(process) if family else []
        learner.send_signal(signal.SIGTERM)
        start = time.monotonic()
        psutil.wait_procs(collecting, timeout=4 * END_SECONDS)
        self.seen.end_seconds = time.monotonic() - start
        self.seen.exit_status = learner.wait(timeout=60)
        if self.seen.exit_status < 0:
            self.seen.exit_status = 128 - self.seen.exit_status
        _, left = psutil.wait_procs(family, timeout=5)
        self.seen.orphans = [p.pid for p in left]
        checkpoint = Run(self.run_dir).checkpoints.latest()
        self.seen.checkpoint_step = -1 if checkpoint is None else checkpoint.step

    def _updates(self) -> int:
        """Rows of metrics so far; reads only what is new."""
        if self.metrics.exists():
            with self.metrics.open("rb") as file:
                file.seek(self.read)
                new = file.read()
            self.read += len(new)
            self.updates += new.count(b"\n")
        return self.updates

    def _rows(self) -> list[dict[str, Any]]:
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text().split("\n")[:-1]]


def workers(process: psutil.Process) -> list[psutil.Process]:
    """Living processes that collect for a learner."""
    found = []
    for child in process.children():
        try:
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def segments() -> set[str]:
    """Shared memory with a name."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("msrl_")}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.0, help="mean ms of a step")
    parser.add_argument("--target", type=float, default=450.0, help="return at the end")
    parser.add_argument("--patience", type=float, default=60.0, help="longest wait for an update")
    parser.add_argument("--growth", type=float, default=40.0, help="MB the learner may grow by")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--folder", type=Path, help="keeps the run there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seen = Chaos(args, folder).play()
        wrong = judge(seen, args.patience, args.target, args.growth)
        log = (folder / "log.txt").read_text()
    rows = seen.rows
    if rows:
        print(
            f"{len(rows):,} updates, {rows[-1]['step']:,} steps; "
            f"{', '.join(f'{seen.faults.count(f)} x {f}' for f in FAULTS)}; "
            f"{rows[-1]['pipeline/restarts']:.0f} workers replaced, "
            f"{rows[-1]['pipeline/discarded']:.0f} slots reclaimed"
        )
        print(
            f"longest wait for an update {seen.longest_gap:.1f} s; memory "
            f"{np.median(seen.memory):.0f} MB, growth {growth(seen.memory):+.1f} MB; return "
            f"{rows[-1].get('episode/return') or 0:.0f}; ended in {seen.end_seconds:.1f} s"
        )
    for name, text in wrong.items():
        print(f"WRONG: {name}: {text}")
    if wrong:
        print(f"\nlog of the run, its end:\n{log[-3000:]}")
    if args.json is not None:
        result = {**asdict(seen), "rows": rows[-1:], "wrong": wrong}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print("all holds" if not wrong else f"{len(wrong)} of the checks failed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
