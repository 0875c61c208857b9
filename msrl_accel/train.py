"""Training: `python -m msrl_accel.train --algo ppo --env CartPole-v1`, or `train(...)` here."""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl_accel.config import TrainConfig, build_parser, config_from_args, resolve_config
from msrl_accel.envs.workers import stop_if_importing_main
from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.progress import format_duration, format_summary
from msrl_accel.run import (
    CONFIG_FILE,
    PLOT_FILE,
    Run,
    check_algorithm,
    check_resumable,
    default_run_dir,
)

if TYPE_CHECKING:
    from msrl_accel.pipeline.loop import TrainingLoop

    MakeTrainer = Callable[[TrainConfig, Run], TrainingLoop]

PROG = "python -m msrl_accel.train"


def train(
    config: TrainConfig | None = None,
    *,
    tuned: bool = True,
    resume: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    **values: Any,
) -> Run:
    """Train a policy and evaluate it.

    Args:
        config: a resolved configuration; or give its values: `algo=`, `env=`, `total_steps=`, ...
        tuned: whether to start from the tuned configuration of `algo` and `env`, if there is one.
        resume: a run directory to continue; values given then override the run's own.
        overrides: values by dotted key, such as {"ppo.learning_rate": 1e-3}.

    Returns:
        The run, complete or stopped by a signal; `run.summary` says what was reached.

    Raises:
        ConfigError, SpaceError, EnvError, CheckpointError: see `msrl_accel.errors`.
    """
    stop_if_importing_main()
    if config is None:
        config_file = _saved_config(resume, values.get("algo"))
        config = resolve_config(config_file=config_file, tuned=tuned, overrides=overrides, **values)
    elif overrides or values:
        given = ", ".join([*values, *(overrides or {})])
        raise ConfigError(
            f"{given}: given besides a whole config; give only one of them, "
            "or the result of config.replace"
        )
    run, _ = _train(config, resume)
    return run


def _saved_config(resume: str | Path | None, algo: str | None) -> Path | None:
    """The config file of the run to resume; None for a new run."""
    if resume is None:
        return None
    run = Run(resume)
    # Before values are laid over the file: its sections mean nothing to another algorithm.
    check_algorithm(run, algo or run.config.algo)
    return run.path / CONFIG_FILE


def _train(
    config: TrainConfig, resume: str | Path | None, make: MakeTrainer | None = None
) -> tuple[Run, str | None]:
    """The run, and the name of the signal that stopped it early.

    Args:
        make: another trainer than the configuration's.
    """
    trainer = _make_trainer(config, resume, make)
    run = trainer.run
    try:
        if resume is not None:
            trainer.restore()
            if trainer.step >= config.total_steps and run.summary:
                print(
                    _already_complete(run, trainer.step, config)
                )  # even when quiet: nothing was done
                return run, None
            run.continue_as(config)
        stopped_by = trainer.train()
        run.save_plot()
        if stopped_by is not None:
            _say(config, _stopped(run, trainer.step, config))
        else:
            _evaluate(trainer)
        return run, stopped_by
    except KeyboardInterrupt:
        _say(config, _interrupted(run, trainer.saved_step, config))
        raise
    finally:
        trainer.close()


def _make_trainer(
    config: TrainConfig, resume: str | Path | None, make: MakeTrainer | None
) -> TrainingLoop:
    # Imports MindSpore, which config errors need not wait for.
    from msrl_accel.pipeline import trainer_class

    make = make or trainer_class(config)
    if resume is not None:
        run = Run(resume)
        check_resumable(run, config)
        return make(config, run)
    config = config.replace(run_dir=config.run_dir or default_run_dir(config))
    run = Run.create(config)
    try:
        return make(config, run)
    except BaseException:
        run.discard()
        raise


def _evaluate(trainer: TrainingLoop) -> None:
    """The closing evaluation, into the run's summary."""
    run, config = trainer.run, trainer.config
    results = {
        kind: trainer.evaluate(deterministic=kind == "deterministic")
        for kind in ("deterministic", "sampled")
    }
    summary = {
        "algo": config.algo,
        "env": config.env,
        "seed": config.seed,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 3),
        **trainer.facts(),
        **{kind: result.to_dict() for kind, result in results.items()},
    }
    run.write_summary(summary)
    step, seconds = trainer.step, trainer.seconds
    rows = {f"{trainer.result_name}, {kind}": str(result) for kind, result in results.items()}
    rows["steps"] = f"{step:,} in {format_duration(seconds)} ({step / max(seconds, 1e-9):,.0f}/s)"
    rows["run directory"] = str(run.path)
    rows["learning curve"] = str(run.path / PLOT_FILE)
    rows["evaluate again"] = f"python -m msrl_accel.evaluate {run.path}"
    rows.update(trainer.next_steps())
    _say(config, format_summary(f"Trained {config.algo} on {config.env}", rows))


def _say(config: TrainConfig, text: str) -> None:
    if not config.quiet:
        print(text)


def _stopped(run: Run, step: int, config: TrainConfig) -> str:
    rows = {
        "steps": f"{step:,} of {config.total_steps:,}",
        "run directory": str(run.path),
        "continue": f"{PROG} --resume {run.path}",
    }
    # Not by which signal: within a graph, MindSpore turns Ctrl-C's SIGINT into SIGTERM.
    return format_summary("Stopped as asked, checkpoint written", rows)


def _interrupted(run: Run, saved_step: int, config: TrainConfig) -> str:
    rows = {
        "last checkpoint": f"step {saved_step:,} of {config.total_steps:,}",
        "continue": f"{PROG} --resume {run.path}",
    }
    return format_summary("Interrupted, not waiting for the iteration to end", rows)


def _already_complete(run: Run, step: int, config: TrainConfig) -> str:
    rows = {
        "steps": f"{step:,} of {config.total_steps:,}",
        "train further": f"{PROG} --resume {run.path} --total-steps {2 * step}",
    }
    return format_summary("Nothing to do: this run is already complete", rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status.

    0 for a complete run, 2 after one line about what is wrong, and as shells have it for one that
    a signal stopped: 143 (SIGTERM) or 130 (SIGINT, which MindSpore may turn into SIGTERM) with a
    checkpoint written, 130 where a second Ctrl-C did not wait for that.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    warnings.formatwarning = lambda message, *_, **__: f"WARNING: {message}\n"
    try:
        args = build_parser(PROG).parse_args(argv)
        config_file = _saved_config(args.resume, args.algo)
        config = config_from_args(args, config_file=config_file)
        _, stopped_by = _train(config, args.resume)
    except MsrlError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0 if stopped_by is None else 128 + signal.Signals[stopped_by]


if __name__ == "__main__":
    sys.exit(main())
