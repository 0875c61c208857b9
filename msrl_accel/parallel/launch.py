"""Start a data-parallel run, and end it when one of its processes dies or hangs.

    python -m msrl_accel.parallel.launch -n 2 -- --algo ppo --env CartPole-v1

msrun starts the processes. In a collective, processes whose peer has died wait without an error,
so they are watched from here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msrl_accel.commandline import CommandParser
from msrl_accel.config import TrainConfig, build_parser, config_from_args
from msrl_accel.errors import ConfigError, MsrlError, PipelineError
from msrl_accel.parallel.ascend import communication_variables
from msrl_accel.parallel.beacon import FOLDER_VARIABLE, Sign, alive, read_signs
from msrl_accel.parallel.rank import ACCUMULATE_VARIABLE
from msrl_accel.run import CONFIG_FILE, default_run_dir

PROG = "python -m msrl_accel.parallel.launch"
LOGS = "logs"
"""Folder of a run with what each process printed."""
STOP_SECONDS = 60.0
"""For all processes to end their iteration and save, once asked to."""
_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 10.0
_TAIL = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is that of `msrl_accel.train`, and 1 where a process failed."""
    try:
        options = _parser().parse_args(argv)
        arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
        run_dir, arguments = _with_run_dir(arguments)
        return Launch(options, arguments, run_dir).run()
    except MsrlError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1 if isinstance(error, PipelineError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog=PROG, description="Train by several processes under msrun.")
    add = parser.add_argument
    add("-n", "--processes", type=int, default=2, help="Processes of the run, over all hosts.")
    add("--local", type=int, help="Those on this host; all by default.")
    add("--node-rank", type=int, default=-1, help="Number of this host, where there are several.")
    add("--master", default="127.0.0.1", help="Address of host 0.")
    add("--port", type=int, help="Port of host 0 for the scheduler; a free one by default.")
    add("--accumulate", type=int, default=1, help="Minibatches of one all-reduce and step.")
    add("--hccl-timeout", type=float, default=120.0, help="Seconds that collectives may take.")
    add("--rank-table", help="Rank table file of Ascend devices, where HCCL needs one.")
    add("--hang-seconds", type=float, default=600.0, help="Without progress, ends the run.")
    add("arguments", nargs=argparse.REMAINDER, help="After --: those of msrl_accel.train.")
    return parser


def _with_run_dir(arguments: list[str]) -> tuple[Path, list[str]]:
    """Check the training arguments, and let them name the directory that all ranks use."""
    args = build_parser(PROG).parse_args(arguments)
    if args.resume is not None:
        return Path(args.resume), arguments
    config: TrainConfig = config_from_args(args)
    path = config.run_dir or default_run_dir(config)
    if (Path(path) / CONFIG_FILE).exists():
        raise ConfigError(
            f"run_dir = {path!r} already holds a run: continue it with --resume {path}, or choose "
            "another directory"
        )
    return Path(path), [*arguments, "--run-dir", path]


class Launch:
    """One msrun job under watch.

    Args:
        options: of this module's command line.
        arguments: of `msrl_accel.train`, with a run directory.
        run_dir: that directory.
    """

    def __init__(
        self, options: argparse.Namespace, arguments: Sequence[str], run_dir: Path
    ) -> None:
        self.options = options
        self.arguments = arguments
        self.local = options.local or options.processes
        self.logs = run_dir / LOGS
        self.asked_at: float | None = None
        self._job: subprocess.Popen[bytes] | None = None
        if options.processes < 1 or options.accumulate < 1:
            raise ConfigError("--processes and --accumulate: give at least 1")

    def run(self) -> int:
        """Start, watch, and end everything that was started; returns the exit status.

        Raises:
            PipelineError: a process died or hangs; the message ends with what it printed last.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        handlers = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        with tempfile.TemporaryDirectory() as folder:
            self.beacons = Path(folder)
            try:
                with (self.logs / "msrun.log").open("wb") as log:
                    self._job = subprocess.Popen(
                        self._command(),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self._environment(),
                        start_new_session=True,
                    )
                return self._watch(self._job)
            finally:
                self._kill()
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def _command(self) -> list[str]:
        o = self.options
        msrun = {
            "worker_num": o.processes,
            "local_worker_num": self.local,
            "node_rank": o.node_rank,
            "master_addr": o.master,
            "master_port": o.port or _free_port(),
            "log_dir": self.logs,
            "cluster_time_out": int(o.hccl_timeout),
            "join": True,
        }
        if o.rank_table is not None:
            msrun["rank_table_file"] = o.rank_table
        flags = [f"--{name}={value}" for name, value in msrun.items()]
        entry = ["python", "-m", "msrl_accel.parallel.rank", *self.arguments]
        return [sys.executable, "-m", "mindspore.parallel.cluster.run", *flags, *entry]

    def _environment(self) -> dict[str, str]:
        # msrun starts the `python` that it finds.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {
            **os.environ,
            **communication_variables(self.options.hccl_timeout),
            "PATH": path,
            "PYTHONUNBUFFERED": "1",
            FOLDER_VARIABLE: str(self.beacons),
            ACCUMULATE_VARIABLE: str(self.options.accumulate),
        }

    def _watch(self, job: subprocess.Popen[bytes]) -> int:
        shown = 0
        while True:
            ended = job.poll() is not None
            signs = read_signs(self.beacons)
            shown = self._relay(shown)
            done = [sign for sign in signs if sign.status is not None]
            if len(done) == self.local:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(_LEAVE_SECONDS)
                self._relay(shown)
                return int(done[0].status or 0)
            if ended:
                raise PipelineError(f"the run ended before it was done.{self._last_words(signs)}")
            for sign in signs:
                if sign.status is None and not alive(sign.pid):
                    raise PipelineError(
                        f"rank {sign.rank} (process {sign.pid}) died in stage {sign.stage!r}; the "
                        f"others, which wait for it, were ended.{self._last_words([sign])}"
                    )
            self._check_progress([sign for sign in signs if sign.status is None])
            if self.asked_at is not None and time.monotonic() - self.asked_at > STOP_SECONDS:
                raise PipelineError(f"not all processes stopped within {STOP_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _check_progress(self, signs: list[Sign]) -> None:
        """PipelineError where no process has given a sign of life for too long."""
        training = [sign for sign in signs if sign.iteration != float("inf")]  # not evaluating
        limit = self.options.hang_seconds
        if not training or time.monotonic() - max(s.time for s in training) <= limit:
            return
        # The others got further, to the collective in which they wait.
        behind = min(training, key=lambda s: (s.iteration, s.time))
        raise PipelineError(
            f"no process got on for {limit:g} s (--hang-seconds); they wait for rank "
            f"{behind.rank} (process {behind.pid}) in stage {behind.stage!r} of iteration "
            f"{behind.iteration:g}.{self._last_words([behind])}"
        )

    def _relay(self, shown: int) -> int:
        """Print what rank 0 has printed since; returns how many bytes of it are shown."""
        file = self.logs / "worker_0.log"
        if not file.exists():
            return shown
        with file.open("rb") as log:
            log.seek(shown)
            new = log.read()
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
        return shown + len(new)

    def _last_words(self, signs: list[Sign]) -> str:
        ranks = [sign.rank for sign in signs] or list(range(self.local))
        texts = []
        for rank in ranks:
            file = self.logs / f"worker_{rank}.log"
            text = file.read_text(errors="replace").strip() if file.exists() else ""
            texts.append(f"\nRank {rank} ({file}):\n{text[-_TAIL:] or '(nothing)'}")
        return "".join(texts)

    def _stop(self, number: int, frame: object) -> None:
        """Ask all ranks to end their iteration and save; a second time, end them at once."""
        if self.asked_at is not None:
            raise PipelineError("interrupted, not waiting for the iteration to end")
        self.asked_at = time.monotonic()
        for sign in read_signs(self.beacons):
            with contextlib.suppress(ProcessLookupError):
                os.kill(sign.pid, signal.SIGTERM)

    def _kill(self) -> None:
        """End all that runs: ranks, which have sessions of their own, msrun and its scheduler."""
        for sign in read_signs(self.beacons):
            if sign.status is None and alive(sign.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(sign.pid, signal.SIGKILL)
        if self._job is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._job.pid, signal.SIGKILL)
            self._job.wait()


def available() -> bool:
    """Whether msrun is here."""
    beside = Path(sys.executable).parent / "msrun"
    return beside.exists() or shutil.which("msrun") is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
