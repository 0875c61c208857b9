"""The configuration of a training run, section by section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from msrl_accel._version import __version__
from msrl_accel.config_schema import Field, Section, memoized
from msrl_accel.config_yaml import PathLike, dump, write_text

_Train = TypeVar("_Train", bound="TrainConfig")


class PolicyConfig(Section):
    """Networks and preprocessing of the policy."""

    hidden_sizes: tuple[int, ...] = Field((64, 64), ge=1)
    """Widths of the hidden layers of each torso."""
    activation: str = Field("tanh", choices=("tanh", "relu"))
    """Activation after each hidden layer."""
    torso_sharing: str = Field("auto", choices=("auto", "shared", "separate"))
    """Whether policy and value share a torso; auto shares it for images only."""
    log_std_init: float = Field(0.0)
    """Initial logarithm of the standard deviation of Gaussian actions."""
    normalize_observations: bool = Field(False)
    """Whether observations are centred and scaled by running statistics kept in the policy."""
    observation_clip: float = Field(10.0, gt=0)
    """Bound of the absolute value of normalised observations."""


class RewardConfig(Section):
    """Preprocessing of the reward that training sees; reported returns stay raw."""

    normalize: bool = Field(False)
    """Whether rewards are divided by the running standard deviation of the discounted return."""
    clip: float = Field(10.0, gt=0)
    """Bound of the absolute value of normalised rewards."""


class EvaluationConfig(Section):
    """Evaluation by separate episodes."""

    episodes: int = Field(20, ge=1)
    """Episodes of each evaluation."""
    interval_steps: int = Field(0, ge=0)
    """Environment steps between evaluations; 0 evaluates at the end only."""
    max_episode_steps: int = Field(100_000, ge=1)
    """Steps after which an episode that has not ended is cut, with a warning."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    interval_seconds: float = Field(60.0, ge=0)
    """Least wall-clock time between checkpoints; 0 writes one every iteration."""
    keep_last: int = Field(3, ge=1)
    """Latest checkpoints kept, besides the best one."""


class LoggingConfig(Section):
    """Where metrics go besides the CSV and JSON lines of the run directory."""

    tensorboard: bool = Field(True)
    """Whether TensorBoard events are written, where a TensorBoard writer is installed."""
    interval_iterations: int = Field(1, ge=1)
    """Iterations between two rows of metrics."""


class RuntimeConfig(Section):
    """Where and how graphs run."""

    device: str = Field("CPU", choices=("CPU", "Ascend", "GPU"))
    """Device target of MindSpore."""
    threads: int = Field(1, ge=1)
    """Threads of an operator on CPU; more than 1 helps large networks only."""
    rollout: str = Field("auto", choices=("auto", "graph", "onnx", "lite"))
    """Engine of the rollout; auto takes onnx where it is installed and agrees with the graph."""
    batch_invariant: bool = Field(False)
    """Whether the rollout's result for an observation must not depend on the batch it is in."""
    compile_cache: bool = Field(True)
    """Whether compiled graphs are kept in ~/.cache/msrl_accel: later runs then start sooner."""


class PipelineConfig(Section):
    """Whether rollout and training overlap, and how (docs/async.md)."""

    mode: str = Field("sync", choices=("sync", "async"))
    """sync collects and trains in turn; async collects in processes of their own meanwhile."""
    engine: str = Field("local", choices=("local", "ray"))
    """Whether workers are processes of this host, or actors of a Ray cluster (extra ray)."""
    ray_address: str | None = Field(None)
    """Of the Ray cluster to join; null starts one on this host, for the run alone."""
    workers: int = Field(2, ge=1)
    """Processes that collect, in async mode."""
    envs_per_worker: int = Field(32, ge=1)
    """Environments of each; n_envs is then the number of trajectories in one update."""
    queue_size: int = Field(4, ge=1)
    """Updates' worth of trajectories that may wait for the learner."""
    stepping: str = Field("auto", choices=("auto", "together", "apart"))
    """Whether a worker's environments step in time or each at its own pace, in a thread; auto lets
    those that wait rather than compute go apart."""
    inference: str = Field("local", choices=("local", "server"))
    """Whether each worker runs the policy, or a server does for all of them in batches."""
    placement: str = Field("colocated", choices=("colocated", "separate"))
    """Whether workers and learner share cores and devices, or each have their own."""
    devices: tuple[int, ...] = Field(())
    """Ascend devices that 'separate' divides; none given, those that the environment grants."""
    max_staleness: int = Field(2, ge=0)
    """Versions of the policy a sample may be behind; 0 is synchronous training. 2 was measured to
    be as fast as more, and to learn faster (docs/staleness.md)."""
    stale: str = Field("drop", choices=("drop", "down_weight"))
    """What happens to samples further behind."""
    lag_discount: float = Field(0.05, ge=0)
    """The learning rate is divided by 1 + this times the mean lag of the batch."""
    publish_interval: int = Field(1, ge=1)
    """Updates between two publications of the policy's weights."""
    hang_seconds: float = Field(60.0, gt=0)
    """A worker that gives no sign of life for so long is replaced."""
    max_restarts: int = Field(5, ge=0)
    """Failures of a worker in a row, without a trajectory between them, that end the run."""
    trace: bool = Field(False)
    """Whether a timeline of all stages is written to trace.json, for Perfetto."""


class TrainConfig(Section):
    """A whole training run.

    Made by `resolve_config` or `load_config`, which add the section of the chosen algorithm under
    its name (``config.ppo``); `algorithm` is that section whatever its name.
    """

    sources: ClassVar[Mapping[str, str]] = {}  # of an instance: dotted key -> who set it

    algo: str = Field()
    """Name of the algorithm."""
    env: str = Field()
    """Id of the environment, as for gymnasium.make; module:Id imports the module first."""
    total_steps: int = Field(100_000, gt=0)
    """Environment steps of the whole run, over all environments."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of every random state of the run."""
    n_envs: int = Field(1, ge=1)
    """Environments stepped together."""
    run_dir: str | None = Field(None)
    """Directory of the run; null makes runs/<env>-<algo>-seed<seed>-<time>."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment, free in name and type."""
    vectorization: str = Field(
        "auto", choices=("auto", "sync", "async", "threads", "batched", "envpool")
    )
    """How environments are stepped: in turn, in subprocesses, in threads, as arrays, by EnvPool."""
    quiet: bool = Field(False)
    """Whether the progress bar and the summary are left out."""
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)

    @property
    def algorithm(self) -> Section:
        """The section of the algorithm."""
        section: Section = getattr(self, self.algo)
        return section

    def with_sources(self: _Train, sources: Mapping[str, str]) -> _Train:
        """This configuration, with a record of who set each key; not part of equality."""
        object.__setattr__(self, "sources", dict(sources))
        return self

    def replace(self: _Train, **changes: Any) -> _Train:
        """A checked copy with the given fields changed."""
        sources = {**self.sources, **dict.fromkeys(changes, "replace")}
        return super().replace(**changes).with_sources(sources)

    def to_yaml(self) -> str:
        """The whole configuration as YAML, after comments that say where values came from."""
        lines = [
            f"# Configuration resolved by msrl_accel {__version__}. It alone reproduces the run:",
            "#   python -m msrl_accel.train --config FILE",
        ]
        for source in dict.fromkeys(self.sources.values()):
            keys = [key for key, origin in self.sources.items() if origin == source]
            lines.append(f"# Set by {' '.join(source.split())}: {', '.join(keys)}")
        return "\n".join(lines) + "\n\n" + dump(self.to_dict())

    def save(self, path: PathLike) -> None:
        """Write `to_yaml` to a file, atomically; `load_config` reads an equal object back."""
        write_text(path, self.to_yaml())

    def __reduce__(self) -> Any:
        # The class is made at run time (`train_config_class`): pickle what it was made from.
        return _rebuild, (self.algo, type(self.algorithm), dict(vars(self)))


@memoized
def train_config_class(algo: str, section: type[Section]) -> type[TrainConfig]:
    """`TrainConfig` with the section of an algorithm under the algorithm's name."""
    body = {
        "__annotations__": {algo: section},
        "__doc__": TrainConfig.__doc__,
        "__module__": __name__,
        algo: Field(default_factory=section),
    }
    return type("TrainConfig", (TrainConfig,), body)


def _rebuild(algo: str, section: type[Section], state: dict[str, Any]) -> TrainConfig:
    cls = train_config_class(algo, section)
    config = cls.__new__(cls)
    vars(config).update(state)
    return config
