"""One process of a data-parallel run: what `msrl_accel.parallel.launch` has msrun start."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msrl_accel.config import TrainConfig, build_parser, config_from_args
from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.parallel.beacon import FOLDER_VARIABLE, Beacon
from msrl_accel.run import CONFIG_FILE, Run
from msrl_accel.train import _train

if TYPE_CHECKING:
    from msrl_accel.parallel.trainer import DataParallelTrainer

ACCUMULATE_VARIABLE = "MSRL_PARALLEL_ACCUMULATE"
FOLLOWERS = "ranks"
"""Folder of a run in which the ranks but the first keep their metrics."""
_PROG = "python -m msrl_accel.parallel.rank"


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank; the arguments are those of `msrl_accel.train`.

    The exit status is 0 also when a signal stopped the run, which the beacon tells: msrun kills
    all other processes at once when one exits with another status.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        args = build_parser(_PROG).parse_args(argv)
        saved = None if args.resume is None else Path(args.resume) / CONFIG_FILE
        config = config_from_args(args, config_file=saved)
        _run(config, args.resume)
    except MsrlError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 2
    return 0


def _run(config: TrainConfig, resume: str | None) -> None:
    from msrl_accel.parallel.collectives import join
    from msrl_accel.parallel.trainer import DataParallelTrainer

    if config.run_dir is None:
        raise ConfigError("run_dir: every rank must be given the same; add --run-dir")
    processes = join(config.runtime)
    beacon = Beacon(os.environ.get(FOLDER_VARIABLE), processes.rank)
    accumulate = int(os.environ.get(ACCUMULATE_VARIABLE, "1"))
    beacon.beat("start", -1)

    def make(whole: TrainConfig, run: Run) -> DataParallelTrainer:
        return DataParallelTrainer(whole, run, processes, accumulate=accumulate, beacon=beacon)

    if processes.rank == 0:
        _, stopped_by = _train(config, resume, make)
    else:
        stopped_by = _follow(make(config, follower_run(config, processes.rank)), resume)
    status = 0 if stopped_by is None else 128 + signal.Signals[stopped_by]
    beacon.beat("end", math.inf, status)


def _follow(trainer: DataParallelTrainer, resume: str | None) -> str | None:
    """Train beside rank 0, which says and keeps what came out; returns what `train` does."""
    try:
        if resume is not None:
            leader = Run(resume)
            trainer.restore_from(leader)
            if trainer.step >= trainer.config.total_steps and leader.summary:
                return None
        return trainer.train()
    finally:
        trainer.close()


def follower_run(config: TrainConfig, rank: int) -> Run:
    """Where a rank but the first writes its metrics."""
    path = Path(str(config.run_dir)) / FOLLOWERS / str(rank)
    if (path / CONFIG_FILE).exists():
        return Run(path)
    return Run.create(config.replace(run_dir=str(path)))


if __name__ == "__main__":
    sys.exit(main())
