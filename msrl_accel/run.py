"""The run directory and what a finished or interrupted run offers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from msrl_accel import html
from msrl_accel.checkpoint import Checkpoint, CheckpointStore, unflatten_state
from msrl_accel.config import TrainConfig, load_config
from msrl_accel.errors import CheckpointError, ConfigError, PolicyError
from msrl_accel.files import write_text_atomic
from msrl_accel.metrics import CSV_FILE, read_metrics
from msrl_accel.plotting import plot_learning_curve
from msrl_accel.progress import format_duration
from msrl_accel.spaces import PolicySpec

if TYPE_CHECKING:
    from msrl_accel.acting import ActingPolicy
    from msrl_accel.lm.language_model import LanguageModel

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
PLOT_FILE = "learning_curve.png"
POLICY_PREFIX = "policy/"
MODEL_FOLDER = "model"
"""The trained language model, for this library and for transformers."""
DESCRIPTION_FOLDER = "tokenizer"
"""Tokenizer and configuration of a language model, which its checkpoints do not repeat."""

WhichCheckpoint = Union[str, int]


def default_run_dir(config: TrainConfig) -> str:
    """runs/<env>-<algo>-seed<seed>-<time>."""
    env = config.env.replace("/", "_").replace(":", "_")
    return f"runs/{env}-{config.algo}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


class Run:
    """A run directory: resolved config, metrics, checkpoints, plot, summary.

    Args:
        path: an existing run directory.

    Raises:
        ConfigError: the directory holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / CONFIG_FILE).is_file():
            raise ConfigError(f"{self.path}: not a run directory ({CONFIG_FILE} is missing)")
        self.config = load_config(self.path / CONFIG_FILE)
        self.checkpoints = CheckpointStore(
            self.path / "checkpoints", keep_last=self.config.checkpoint.keep_last
        )

    @classmethod
    def create(cls, config: TrainConfig) -> Run:
        """Make the directory of a new run and save its config.

        Raises:
            ConfigError: it cannot be written, or already holds a run.
        """
        assert config.run_dir is not None
        path = Path(config.run_dir)
        if (path / CONFIG_FILE).exists():
            raise ConfigError(
                f"run_dir = {str(path)!r} already holds a run: continue it with --resume {path}, "
                "or choose another directory"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            config.save(path / CONFIG_FILE)
        except OSError as error:
            raise ConfigError(
                f"run_dir = {str(path)!r} cannot be written ({error.strerror}): "
                "choose another with --run-dir"
            ) from error
        return cls(path)

    def discard(self) -> None:
        """Remove what `create` made, for a run that could not start."""
        (self.path / CONFIG_FILE).unlink()
        with contextlib.suppress(OSError):  # somebody else's files are in it
            self.path.rmdir()

    def continue_as(self, config: TrainConfig) -> None:
        """Take over the config of a resumed run, so that a further resume goes on to its end."""
        if config != self.config:
            config.save(self.path / CONFIG_FILE)
        self.config = config
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Every logged metric by name, equal lengths, NaN where one was not logged."""
        return read_metrics(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """What the closing evaluation found; empty before the run is complete."""
        file = self.path / SUMMARY_FILE
        if not file.exists():
            return {}
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text_atomic(self.path / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")

    def plot(self) -> Any:
        """The learning curve as a Matplotlib figure (None without Matplotlib)."""
        return plot_learning_curve(self.metrics, None, self._title)

    def save_plot(self) -> None:
        plot_learning_curve(self.metrics, self.path / PLOT_FILE, self._title)

    @property
    def _title(self) -> str:
        return f"{self.config.algo.upper()} on {self.config.env}, seed {self.config.seed}"

    @cached_property
    def policy(self) -> ActingPolicy:
        """The policy of the last checkpoint: `run.policy.act(observation, deterministic=True)`."""
        return self.load_policy("last")

    def load_policy(
        self, which: WhichCheckpoint = "last", *, with_critic: bool = False
    ) -> ActingPolicy:
        """The policy of a checkpoint: 'last', 'best', or a step.

        Args:
            which: the checkpoint.
            with_critic: whether an actor without a value gets that of its critics.
        """
        from msrl_accel.acting import ActingPolicy
        from msrl_accel.algorithms import algorithm_class
        from msrl_accel.device import set_up
        from msrl_accel.runtime.graph import GraphRuntime

        checkpoint = self.checkpoints.load(which)
        if "spec" not in checkpoint.meta:
            raise PolicyError(
                f"{self.path} holds a language model, which acts in no environment: "
                "open it with run.language_model()"
            )
        set_up(self.config.runtime)
        spec = PolicySpec.from_dict(checkpoint.meta["spec"])
        algorithm = algorithm_class(self.config.algo)
        policy = algorithm.build_policy(self.config, spec)
        policy.load_arrays(policy_arrays(checkpoint))
        if with_critic:
            state = unflatten_state(checkpoint.arrays, checkpoint.meta["state"])["trainer"]
            policy = algorithm.with_critic(self.config, policy, state["algorithm"])
        return ActingPolicy(GraphRuntime(policy, version=checkpoint.step), self.config.seed)

    def language_model(self, which: WhichCheckpoint = "last") -> LanguageModel:
        """The language model of a checkpoint: `run.language_model().complete(["12+34="])`."""
        from msrl_accel.lm.runs import load_language_model

        return load_language_model(self, which)

    def __repr__(self) -> str:
        result = self.summary.get("deterministic", {})
        reached = ""
        if "accuracy" in result:
            reached = f", {result['accuracy']:.1%} right of held-out problems"
        elif result:
            reached = f", deterministic return {result['return_mean']:.1f}"
        return f"Run({str(self.path)!r}: {self.config.algo} on {self.config.env}{reached})"

    def _repr_html_(self) -> str:
        """What notebooks show: results, files, and the learning curve where it was drawn."""
        summary = self.summary
        verdict = "complete" if summary else "not complete"
        names = (CONFIG_FILE, SUMMARY_FILE, CSV_FILE, self.checkpoints.directory.name)
        files = [html.link(self.path / n) for n in names if (self.path / n).exists()]
        rows: list[tuple[str, object]] = [
            (f"return, {mode}", _score(summary[mode]))
            for mode in ("deterministic", "sampled")
            if mode in summary
        ]
        if summary:
            duration = format_duration(summary["seconds"])
            rows.append(("steps", f"{summary['steps']:,} in {duration}"))
        rows += [("run directory", self.path), ("files", html.Markup(", ".join(files)))]
        plot = self.path / PLOT_FILE
        curve = html.png(plot.read_bytes(), "learning curve") if plot.is_file() else ""
        title = html.verdict(f"{self._title}: {verdict}", bool(summary))
        return f"<div>{title}{html.table(rows)}{curve}</div>"


def _score(evaluation: Mapping[str, Any]) -> str:
    if "accuracy" in evaluation:
        problems = f"{evaluation['problems']} held-out problems"
        return f"{evaluation['return_mean']:.3f}; {evaluation['accuracy']:.1%} right of {problems}"
    mean, std = evaluation["return_mean"], evaluation["return_std"]
    return f"{mean:.1f} +- {std:.1f} over {evaluation['episodes']} episodes"


def policy_arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Weights and statistics of a checkpoint's policy, by name."""
    n = len(POLICY_PREFIX)
    return {k[n:]: v for k, v in checkpoint.arrays.items() if k.startswith(POLICY_PREFIX)}


def load_run(path: str | Path) -> Run:
    """Open a run directory.

    Raises:
        ConfigError: the directory holds no run.
    """
    return Run(path)


def check_algorithm(run: Run, algo: str) -> None:
    """Raise CheckpointError where a run is to be continued with another algorithm."""
    if algo != run.config.algo:
        raise _different(run, "algo", algo, run.config.algo)


def check_resumable(run: Run, config: TrainConfig) -> None:
    """Refuse to continue a run as something else.

    Raises:
        CheckpointError: algorithm, environment, seed, number of environments or policy differ.
        ConfigError: it is to continue in another directory than its own.
    """
    where = config.run_dir
    if config.sources.get("run_dir") not in (None, str(run.path / CONFIG_FILE)) and (
        where is not None and Path(where).resolve() != run.path.resolve()
    ):
        raise ConfigError(
            f"run_dir = {where!r}: the run in {run.path} continues there; leave it out, or copy "
            "the directory and resume the copy"
        )
    theirs = _identity(run.config)
    for key, value in _identity(config).items():
        if value != theirs[key]:
            raise _different(run, key, value, theirs[key])


def _identity(config: TrainConfig) -> dict[str, Any]:
    """The values, by key, that no resumed run may change."""
    values = {key: getattr(config, key) for key in ("algo", "env", "env_kwargs", "seed", "n_envs")}
    values["pipeline.mode"] = config.pipeline.mode
    for key in config.algorithm.fixed:
        values[f"{config.algo}.{key}"] = getattr(config.algorithm, key)
    return {**values, **{f"policy.{key}": value for key, value in vars(config.policy).items()}}


def _different(run: Run, key: str, ours: Any, theirs: Any) -> CheckpointError:
    return CheckpointError(
        f"{key} = {ours!r}: the run in {run.path} has {theirs!r}; "
        "leave it out to resume, or start a new run"
    )
