"""Training of language models on text tasks: what is common, and supervised training."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from msrl_accel.algorithms.language_model import LanguageModelAlgorithm, LanguageModelConfig
from msrl_accel.algorithms.sft import SFT, SFTConfig
from msrl_accel.config import TrainConfig
from msrl_accel.config_schema import fields_of
from msrl_accel.envs.text import Problem, make_task
from msrl_accel.errors import CheckpointError, ConfigError, EnvError
from msrl_accel.evaluation import evaluation_seed
from msrl_accel.lm.evaluation import TextEvaluation
from msrl_accel.lm.generation import Generator
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.opening import OpenedModel, load_description, open_model, save_description
from msrl_accel.lm.prompts import PromptEncoder
from msrl_accel.lm.rollout import Roller, Rollout, evaluate_problems
from msrl_accel.lm.samples import SAMPLES_FILE, SampleLog
from msrl_accel.lm.weights import save_model
from msrl_accel.pipeline.loop import TrainingLoop
from msrl_accel.run import DESCRIPTION_FOLDER, MODEL_FOLDER, Run

logger = logging.getLogger("msrl_accel")

_UNUSED = {
    "n_envs": "how much is done at a time is a matter of prompts, groups and batches",
    "vectorization": "text tasks have no environments to step",
    "policy": "the policy is the language model",
    "reward": "rewards are compared within their group",
    "pipeline": "rollout and training take turns in one process, or for grpo, by pipeline.mode "
    "async with workers, max_staleness, hang_seconds and max_restarts alone, in several",
}
"""Keys and sections of the configuration that language models do not heed, with the reason."""


class LanguageModelTrainer(TrainingLoop):
    """A run of a language model: task, verifiers, model, generation.

    A subclass makes its algorithm in `build` and moves the run on in `iterate`.

    Args:
        config: resolved.
        run: its directory; one that holds checkpoints is about to be resumed.
    """

    algorithm: LanguageModelAlgorithm
    pipeline_keys: ClassVar[tuple[str, ...]] = ()
    """Of the section pipeline, those it heeds."""
    result_name = "held out"

    def __init__(self, config: TrainConfig, run: Run) -> None:
        _check_unused(config, self.pipeline_keys)
        super().__init__(config, run)
        options = config.algorithm
        assert isinstance(options, LanguageModelConfig)
        self.task = make_task(config.env, **config.env_kwargs)
        opened = self._open(options)
        self.encoder = PromptEncoder(opened.tokenizer, options.prompt, options.system_prompt)
        self.longest_prompt = options.max_prompt_tokens
        self.pass_samples = options.pass_samples
        self._check_data_set()
        self.held_out = self._held_out_problems()
        self.model = CausalLM(opened.config, config.seed if opened.arrays is None else None)
        if opened.arrays is not None:
            self.model.load_arrays(opened.arrays)
        self.generator = Generator(
            self.model, options.max_new_tokens, max_rows=options.rollout_rows
        )
        problems, noise, shuffle = np.random.SeedSequence(config.seed).spawn(3)
        self.problem_rng = np.random.default_rng(problems)
        self.noise_rng = np.random.default_rng(noise)
        self.shuffle_rng = np.random.default_rng(shuffle)
        self.mean_reward = np.nan
        """Of the last iteration."""
        self.build()
        self.samples: SampleLog | None = None
        self.scorer = options.make_scorer(self.task)
        self.roller = Roller(self.generator, self.encoder, self.scorer, **options.sampling)
        if not (run.path / DESCRIPTION_FOLDER).exists():
            save_description(run.path / DESCRIPTION_FOLDER, opened)

    @abstractmethod
    def build(self) -> None:
        """Make the algorithm, and what else iterations need."""

    def draw_problems(self, n: int) -> list[Problem]:
        """n training problems, none with too long a prompt.

        Raises:
            EnvError: hardly any prompt is short enough.
        """
        return self.encoder.draw(self.task, self.problem_rng, n, self.longest_prompt)

    def evaluate(self, deterministic: bool) -> TextEvaluation:
        """Completions of the held-out problems: greedy, or some samples of each.

        Raises:
            EnvError: not one of them could be scored.
        """
        samples = 1 if deterministic else self.pass_samples
        seed = None if deterministic else evaluation_seed(self.config)
        result, rollout = evaluate_problems(self.roller, self.held_out, samples, seed)
        self.log_samples(rollout, "held_out")
        return result

    def evaluation_metrics(self) -> dict[str, float]:
        try:
            greedy, sampled = self.evaluate(deterministic=True), self.evaluate(deterministic=False)
        except EnvError as error:  # training ends the run if its own completions fare no better
            logger.warning("%s", error)
            return {}
        rates = {f"eval/pass@{k}": rate for k, rate in sampled.pass_rates().items()}
        return {
            "eval/return": greedy.mean,
            "eval/accuracy": greedy.accuracy,
            **rates,
        }

    def next_steps(self) -> dict[str, str]:
        return {
            "model": f"{self.run.path / MODEL_FOLDER} (transformers reads it too)",
            "completions": str(self.run.path / SAMPLES_FILE),
        }

    def log_samples(self, rollout: Rollout, split: str) -> None:
        """Some of the completions into the run's samples, those that could not be scored first."""
        if self.samples is None:
            self.samples = SampleLog(self.run.path, resume_step=self.step if self.resumed else None)
        self.samples.log(
            self.step,
            rollout.asked,
            rollout.texts,
            rollout.scores,
            stops=rollout.completions.stop.tolist(),
            lengths=rollout.completions.lengths.tolist(),
            split=split,
        )

    def train(self) -> str | None:
        stopped_by = super().train()
        save_model(
            self.run.path / MODEL_FOLDER,
            self.model.config,
            self.weights(),
            self.encoder.tokenizer,
        )
        return stopped_by

    @property
    def score(self) -> float:
        """Mean reward of the last iteration."""
        return self.mean_reward

    def weights(self) -> dict[str, np.ndarray]:
        """Not copied on CPU: to be written before training goes on."""
        return {p.name: p.asnumpy() for p in self.model.weights}

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        self.model.load_arrays(arrays)

    def meta(self) -> dict[str, Any]:
        return {"language_model": self.model.config.to_dict()}

    def state(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm.state(),
            "rngs": [rng.bit_generator.state for rng in self._rngs],
            "version": self.generator.version,
            "mean_reward": self.mean_reward,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        self.algorithm.restore(state["algorithm"])
        for rng, saved in zip(self._rngs, state["rngs"]):
            rng.bit_generator.state = saved
        self.generator.version = int(state["version"])
        self.mean_reward = float(state["mean_reward"])

    def close(self) -> None:
        self.scorer.close()
        if self.samples is not None:
            self.samples.close()

    @property
    def _rngs(self) -> tuple[np.random.Generator, ...]:
        return self.problem_rng, self.noise_rng, self.shuffle_rng

    def _open(self, options: LanguageModelConfig) -> OpenedModel:
        """The model to train; of a run to be resumed, what its checkpoints do not hold."""
        described = self.run.path / DESCRIPTION_FOLDER
        if self.run.checkpoints.steps():
            if not described.exists():
                raise CheckpointError(
                    f"{described} is missing: without it the checkpoints cannot be used"
                )
            return load_description(described)
        return open_model(
            options.model,
            positions=options.max_prompt_tokens + options.max_new_tokens,
            characters=self.task.characters,
        )

    def _short(self, problems: Sequence[Problem]) -> list[Problem]:
        return self.encoder.short(problems, self.longest_prompt)

    def _check_data_set(self) -> None:
        """Encode every prompt and answer of a finite data set, and warn of those left out."""
        problems = list(self.task.problems)
        for problem in problems:
            self.encoder.answer(self.task.demonstrate(problem))
        left_out = len(problems) - len(self._short(problems))
        if left_out:
            logger.warning(
                "%d of the %d problems of %s are left out: their prompts have more than "
                "%s.max_prompt_tokens = %d tokens",
                left_out,
                len(problems),
                self.config.env,
                self.config.algo,
                self.longest_prompt,
            )

    def _held_out_problems(self) -> list[Problem]:
        problems = self._short(self.task.held_out(self.config.evaluation.episodes))
        if not problems:
            raise ConfigError(
                f"env = {self.config.env!r}: it has no held-out problems with prompts of at most "
                f"{self.config.algo}.max_prompt_tokens = {self.longest_prompt} tokens to evaluate "
                "on; raise that, or the data set's held_out_fraction"
            )
        return problems


class SFTTrainer(LanguageModelTrainer):
    """Supervised training on right completions. A step is an example."""

    algorithm: SFT

    def build(self) -> None:
        options = self.config.algorithm
        assert isinstance(options, SFTConfig)
        self.options = options
        self.algorithm = SFT(self.config, self.model)

    def iterate(self) -> dict[str, float]:
        """Some optimiser steps."""
        start = time.perf_counter()
        steps = []
        for _ in range(self.options.updates_per_iteration):
            problems = self.draw_problems(self.options.batch_size)
            examples = self.encoder.demonstrations(self.task, problems)
            steps.append(self.algorithm.update(examples, self.step / self.config.total_steps))
            self.step += self.options.batch_size
            self.generator.version += 1
        self.iteration += 1
        seconds = time.perf_counter() - start
        tokens = sum(metrics["tokens"] for metrics in steps)
        return {
            **{f"sft/{k}": float(np.mean([m[k] for m in steps])) for k in steps[0]},
            "time/update_seconds": seconds,
            "time/tokens_per_second": tokens / seconds,
        }


def _check_unused(config: TrainConfig, pipeline_keys: tuple[str, ...]) -> None:
    """Refuse settings that would silently do nothing."""
    values = {name: getattr(config, name) for name in _UNUSED}
    for name, value in values.items():
        default = fields_of(TrainConfig)[name].default()
        if value == default:
            continue
        if fields_of(TrainConfig)[name].section is None:
            raise ConfigError(f"{name} = {value!r}: {config.algo} does not use it: {_UNUSED[name]}")
        for key, part in vars(value).items():
            heeded = name == "pipeline" and key in pipeline_keys
            if part != getattr(default, key) and not heeded:
                raise ConfigError(
                    f"{name}.{key} = {part!r}: {config.algo} does not use it: {_UNUSED[name]}"
                )
