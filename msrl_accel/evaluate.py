"""Evaluation of a run: `python -m msrl_accel.evaluate RUN`, or `evaluate(run)` from Python."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl_accel.commandline import CommandParser
from msrl_accel.errors import ConfigError, MsrlError
from msrl_accel.progress import format_summary
from msrl_accel.run import Run, WhichCheckpoint

if TYPE_CHECKING:
    from msrl_accel.acting import ActingPolicy
    from msrl_accel.evaluation import Evaluation
    from msrl_accel.lm.evaluation import TextEvaluation
    from msrl_accel.render import Episode

PROG = "python -m msrl_accel.evaluate"
DEFAULT_EPISODES = 20


def evaluate(
    run: Run | str | Path,
    episodes: int | None = None,
    *,
    deterministic: bool = True,
    checkpoint: WhichCheckpoint = "last",
    seed: int | None = None,
) -> Evaluation:
    """Play whole episodes with the policy of a run, or let its language model solve problems.

    Args:
        run: a run, or its directory.
        episodes: how many, at least 1; default 20. Of a language model: held-out problems, by
            default as many as in the run's own evaluations.
        deterministic: the mode of the action distribution; otherwise samples.
        checkpoint: "last", "best" (by mean training return), or the step of one.
        seed: of the environments and the samples; by default that of the run's own closing
            evaluation, which is so repeated exactly.

    Returns:
        Returns and lengths of the episodes, their mean and standard deviation.

    Raises:
        ConfigError: the directory holds no run, or episodes is below 1.
        CheckpointError: there is no such checkpoint, or it is damaged.
        EnvError: the environment cannot be made, or fails.
    """
    run = run if isinstance(run, Run) else Run(run)
    _check_counts(episodes, seed)
    if _has_language_model(run):
        return _evaluate_text(run, episodes, deterministic, checkpoint, seed)
    return _evaluate(run, _load_policy(run, checkpoint), episodes, deterministic, seed)


def _has_language_model(run: Run) -> bool:
    from msrl_accel.algorithms.language_model import LanguageModelConfig

    return isinstance(run.config.algorithm, LanguageModelConfig)


def _evaluate_text(
    run: Run,
    problems: int | None,
    deterministic: bool,
    checkpoint: WhichCheckpoint,
    seed: int | None,
) -> TextEvaluation:
    from msrl_accel.lm.runs import evaluate_language_model

    return evaluate_language_model(
        run,
        run.config.evaluation.episodes if problems is None else problems,
        deterministic=deterministic,
        checkpoint=checkpoint,
        seed=seed,
    )


def _check_counts(episodes: int | None, seed: int | None) -> None:
    if episodes is not None and episodes < 1:
        raise ConfigError(f"episodes = {episodes}: must be at least 1")
    if seed is not None and seed < 0:
        raise ConfigError(f"seed = {seed}: must be at least 0")


def _load_policy(run: Run, checkpoint: WhichCheckpoint) -> ActingPolicy:
    return run.policy if checkpoint == "last" else run.load_policy(checkpoint)


def _evaluate(
    run: Run, policy: ActingPolicy, episodes: int | None, deterministic: bool, seed: int | None
) -> Evaluation:
    from msrl_accel.evaluation import evaluate_run_policy

    episodes = DEFAULT_EPISODES if episodes is None else episodes
    return evaluate_run_policy(
        policy.runtime, run.config, episodes, deterministic=deterministic, seed=seed
    )


def _render(
    run: Run, policy: ActingPolicy, path: Path, deterministic: bool, seed: int | None
) -> Episode:
    from msrl_accel.evaluation import evaluation_seed
    from msrl_accel.render import render_episode

    return render_episode(
        policy,
        run.config.env,
        path,
        env_kwargs=run.config.env_kwargs,
        deterministic=deterministic,
        seed=evaluation_seed(run.config) if seed is None else seed,
    )


def build_parser() -> argparse.ArgumentParser:
    """Command line of evaluation. Mistakes raise `ConfigError`; ``--help`` prints and exits."""
    parser = CommandParser(
        prog=PROG, description="Evaluate the policy of a run.", allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="Run directory.")
    parser.add_argument(
        "--episodes",
        type=int,
        help=f"Whole episodes to play (default {DEFAULT_EPISODES}); of a language model, held-out "
        "problems (default: as in training).",
    )
    parser.add_argument(
        "--checkpoint",
        type=_checkpoint,
        default="last",
        metavar="last|best|STEP",
        help="Which checkpoint acts: the newest (default), the one of the best training return, "
        "or that of a step.",
    )
    parser.add_argument(
        "--sampled",
        action="store_true",
        help="Sample actions; otherwise the mode of their distribution is taken.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="Seed of environments and samples (default: that of the closing evaluation).",
    )
    parser.add_argument(
        "--render", metavar="FILE", type=Path, help="Write one episode as a .gif or .mp4 file."
    )
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    return parser


def _checkpoint(text: str) -> WhichCheckpoint:
    if text in ("last", "best"):
        return text
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not last, best or a step") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, or 2 after one line about what is wrong."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        args = build_parser().parse_args(argv)
        print(_report(args))
    except MsrlError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    return 0


def _report(args: argparse.Namespace) -> str:
    """Do what the arguments ask; returns what to print."""
    run = Run(args.run)
    _check_counts(args.episodes, args.seed)
    if args.render is not None:
        from msrl_accel.render import check_target

        check_target(args.render)
    if _has_language_model(run):
        return _text_report(run, args)
    policy = _load_policy(run, args.checkpoint)
    deterministic = not args.sampled
    result = _evaluate(run, policy, args.episodes, deterministic, args.seed)
    episode = None
    if args.render is not None:
        episode = _render(run, policy, args.render, deterministic, args.seed)
    make = _as_json if args.json else _as_text
    return make(run, policy.runtime.version, result, episode)


def _text_report(run: Run, args: argparse.Namespace) -> str:
    """As `_report`, for a language model."""
    if args.render is not None:
        raise ConfigError(
            f"--render {args.render}: a language model has nothing to draw; its completions are in "
            f"{run.path / 'samples.jsonl'}"
        )
    result = _evaluate_text(run, args.episodes, not args.sampled, args.checkpoint, args.seed)
    step = run.checkpoints.load(args.checkpoint).step
    if args.json:
        return _as_json(run, step, result, None)
    rows = {
        "held out": result,
        "mean length": f"{result.lengths.mean():.1f} tokens",
        "checkpoint": f"step {step:,}",
    }
    return format_summary(f"{run.config.algo} on {run.config.env}", rows)


def _as_json(run: Run, step: int, result: Evaluation, episode: Episode | None) -> str:
    content: dict[str, Any] = {
        "run": str(run.path),
        "algo": run.config.algo,
        "env": run.config.env,
        "checkpoint_step": step,
        **result.to_dict(),
    }
    if episode is not None:
        content["render"] = {
            "file": str(episode.path),
            "return": episode.total_reward,
            "length": episode.length,
        }
    return json.dumps(content, indent=2)


def _as_text(run: Run, step: int, result: Evaluation, episode: Episode | None) -> str:
    rows = {
        "return": result,
        "lowest, highest": f"{result.returns.min():.1f}, {result.returns.max():.1f}",
        "episode length": f"{result.lengths.mean():.1f} steps",
        "checkpoint": f"step {step:,}",
    }
    if episode is None:
        rows["watch it act"] = f"{PROG} {run.path} --render episode.gif"
    else:
        what = f"{episode.length} steps, return {episode.total_reward:.1f}"
        rows["rendered"] = f"{episode.path} ({what})"
    return format_summary(f"{run.config.algo} on {run.config.env}", rows)


if __name__ == "__main__":
    sys.exit(main())
