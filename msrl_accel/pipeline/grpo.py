"""GRPO's loop: warm start, then problems, groups of completions, rewards, update."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from msrl_accel.algorithms.grpo import GRPO, GRPOConfig
from msrl_accel.algorithms.language_model import Learner
from msrl_accel.algorithms.sft import supervised_step
from msrl_accel.envs.text import describe_failures, usable_groups
from msrl_accel.errors import ConfigError, EnvError, MsrlError
from msrl_accel.lm.advantages import informative
from msrl_accel.lm.culprit import check_parity
from msrl_accel.lm.evaluation import right_completions
from msrl_accel.lm.rollout import Rollout, join, select
from msrl_accel.pipeline.lm import LanguageModelTrainer

logger = logging.getLogger("msrl_accel")

WARM_START_EXAMPLES = 32_000
"""For a model that knows nothing."""
_WARM_START_UPDATES = 10
"""Optimiser steps of one iteration of the warm start."""
_WARM_START_PROBLEMS = 128
"""Problems whose greedy completions tell whether the warm start has done enough."""
_MAX_BARREN = 3
"""Iterations in a row that leave nothing to learn from, before the run ends."""


class GRPOTrainer(LanguageModelTrainer):
    """Trains on groups of completions that the present model samples.

    Steps are completions, and before them the examples of the warm start.
    """

    algorithm: GRPO

    def build(self) -> None:
        config, options = self.config, self.config.algorithm
        assert isinstance(options, GRPOConfig)
        self.options = options
        if options.partial_tokens is not None and config.pipeline.mode != "async":
            raise ConfigError(
                f"grpo.partial_tokens = {options.partial_tokens}: newer weights come in the middle "
                "of a completion in pipeline.mode async alone; set that too, or leave it out"
            )
        self.algorithm = GRPO(config, self.model)
        default = 0 if options.model is not None else WARM_START_EXAMPLES
        given = options.warm_start_examples
        self.warm_examples: int = default if given is None else given
        """Examples of the warm start; once it has ended early, those it took."""
        if config.total_steps <= self.warm_examples:
            raise ConfigError(
                f"total_steps = {config.total_steps}: the warm start alone takes "
                f"{self.warm_examples}; raise it, or lower grpo.warm_start_examples"
            )
        self.warm_learner: Learner | None = None
        if self.warm_examples:
            rate = options.warm_start_learning_rate
            self.warm_learner = Learner(self.model, None, options, learning_rate=rate)
        else:
            self.algorithm.start()
        self.start: dict[str, Any] = {}
        """What the model reached on held-out problems before the first update."""
        self.barren = 0
        """Iterations in a row that left nothing to learn from."""
        self.failures = 0
        """Iterations in which a verifier failed."""

    def iterate(self) -> dict[str, float]:
        """One update, on new completions; before that the warm start."""
        if self.warm_learner is not None:
            return self._warm_up(self.warm_learner)
        before = [rng.bit_generator.state for rng in self._rngs]
        try:
            if not self.start:
                self.start = self._evaluate_start()
            start = time.perf_counter()
            gathered = self._gather()
            rolled_out = time.perf_counter()
            rollout = self._trainable(gathered)
            log_probs = self._own_log_probs(rollout)
        except MsrlError:
            # Whoever mends the cause can resume with the very same problems.
            for rng, state in zip(self._rngs, before):
                rng.bit_generator.state = state
            if self.step != self.saved_step:
                self.save()
            raise
        metrics = self._rollout_metrics(gathered, rollout)
        progress = (self.step - self.warm_examples) / (self.config.total_steps - self.warm_examples)
        if rollout is not None:
            metrics.update(self.algorithm.update(rollout, progress, self.shuffle_rng, log_probs))
            self.generator.version += 1
        self.step += sum(r.n for r in gathered)
        self.iteration += 1
        self.mean_reward = metrics["episode/return"]
        for part in gathered[:1]:
            self.log_samples(part, "train")
        updated = time.perf_counter()
        tokens = sum(int(r.completions.lengths.sum()) for r in gathered)
        metrics["time/rollout_seconds"] = rolled_out - start
        metrics["time/update_seconds"] = updated - rolled_out
        metrics["time/tokens_per_second"] = tokens / (updated - start)
        return metrics

    def _warm_up(self, learner: Learner) -> dict[str, float]:
        """Some optimiser steps on right completions."""
        start = time.perf_counter()
        steps = []
        for _ in range(_WARM_START_UPDATES):
            n = min(self.options.warm_start_batch_size, self.warm_examples - self.step)
            examples = self.encoder.demonstrations(self.task, self.draw_problems(n))
            steps.append(supervised_step(learner, examples, 0.0))  # the schedule is GRPO's
            self.step += n
            self.generator.version += 1
            if self.step == self.warm_examples:
                break
        self.iteration += 1
        metrics = {f"sft/{name}": float(np.mean([m[name] for m in steps])) for name in steps[0]}
        enough = self.options.warm_start_accuracy
        if enough is not None:
            answers = self.roller.roll(self.draw_problems(_WARM_START_PROBLEMS), 1, None)
            metrics["sft/accuracy"] = float(right_completions(answers.scores).mean())
            if metrics["sft/accuracy"] >= enough:
                self.warm_examples = self.step
        if self.step == self.warm_examples:
            self.warm_learner = None
            self.algorithm.start()
        return {**metrics, "time/update_seconds": time.perf_counter() - start}

    def _evaluate_start(self) -> dict[str, Any]:
        results = {}
        for kind in ("deterministic", "sampled"):
            content = self.evaluate(kind == "deterministic").to_dict()
            results[kind] = {k: v for k, v in content.items() if k != "returns"}
        return results

    def facts(self) -> dict[str, Any]:
        return {"start": self.start}

    def _gather(self) -> list[Rollout]:
        """Groups of completions; further ones while too few are worth training on."""
        o = self.options
        wanted = o.prompts_per_iteration
        gathered = []
        for _ in range(1 + (o.max_resamples if self.algorithm.settings.filter_groups else 0)):
            problems = self.draw_problems(wanted)
            gathered.append(self.roller.roll(problems, o.group_size, self.noise_rng))
            if sum(int(self._worthwhile(r).sum()) for r in gathered) >= wanted:
                break
        return gathered

    def _worthwhile(self, rollout: Rollout) -> np.ndarray:
        """Groups that training may use [problems]: scored, and not all equal where that counts."""
        size = self.options.group_size
        usable = usable_groups(rollout.scores, size)
        if self.algorithm.settings.filter_groups:
            rewards = np.where(np.repeat(usable, size), self.algorithm.rewards(rollout), 0.0)
            usable &= informative(rewards, rollout.completions.prompt_index)[::size]
        return usable

    def _trainable(self, gathered: list[Rollout]) -> Rollout | None:
        """The groups to train on; None where there are none.

        Raises:
            EnvError: there were none for some iterations.
        """
        self._report_failures(gathered)
        parts = [select(r, np.flatnonzero(self._worthwhile(r))) for r in gathered]
        parts = [part for part in parts if part.n]
        if parts:
            self.barren = 0
            joined = join(parts)
            return select(joined, np.arange(self.options.prompts_per_iteration))
        self.barren += 1
        scores = [score for r in gathered for score in r.scores]
        reason = describe_failures(scores)
        if not reason:
            mean = np.mean([r.rewards.mean() for r in gathered])
            reason = (
                f"in each of {sum(len(r.problems) for r in gathered)} groups all rewards are equal "
                f"(their mean is {mean:.3g}): the task is solved, or too hard to start with; end "
                "the run, change the task, or raise grpo.max_resamples"
            )
        if self.barren >= _MAX_BARREN:
            raise EnvError(f"{self.barren} iterations left nothing to train on: {reason}")
        logger.warning("iteration %d leaves nothing to train on: %s", self.iteration, reason)
        return None

    def _report_failures(self, gathered: list[Rollout]) -> None:
        """Warn in the 1st, 2nd, 4th, 8th ... iteration with a verifier that failed."""
        text = describe_failures([score for r in gathered for score in r.scores])
        if not text:
            return
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            logger.warning("%s\ntheir groups are left out of training", text)

    def _own_log_probs(self, rollout: Rollout | None) -> np.ndarray | None:
        """The model's own log-probabilities, where something asks for them before the update.

        Raises:
            ParityError: those of generation differ by more than the gate.
        """
        gate = self.options.parity_gate
        if rollout is None or (gate is None and not self.algorithm.needs_log_probs):
            return None
        log_probs = self.algorithm.log_probs(rollout)
        if gate is not None:
            check_parity(
                rollout,
                log_probs,
                gate,
                model=self.model,
                generator=self.generator,
                tokenizer=self.encoder.tokenizer,
                temperature=self.options.temperature,
            )
        return log_probs

    def _rollout_metrics(
        self, gathered: list[Rollout], trained: Rollout | None
    ) -> dict[str, float]:
        rewards = np.concatenate([r.rewards for r in gathered])
        scores = [score for r in gathered for score in r.scores]
        scored = rewards[np.isfinite(rewards)]
        groups = rewards.reshape(-1, self.options.group_size)
        lengths = np.concatenate([r.completions.lengths for r in gathered])
        stops = np.concatenate([r.completions.stop for r in gathered])
        version = min(r.completions.version for r in gathered)
        return {
            "episode/return": float(scored.mean()) if scored.size else np.nan,
            "rollout/reward_std": float(scored.std()) if scored.size else np.nan,
            "rollout/accuracy": float(right_completions(scores).mean()),
            "rollout/length": float(lengths.mean()),
            "rollout/truncated": float(np.mean(stops == "length")),
            "rollout/failed": float(len(rewards) - scored.size),
            "rollout/groups": float(len(groups)),
            "rollout/groups_trained": float(len(trained.problems) if trained else 0),
            "rollout/groups_equal": float(np.mean(np.ptp(groups, axis=1) == 0)),
            "rollout/version": float(version),
            "rollout/lag": float(self.generator.version - version),
        }

    def state(self) -> dict[str, Any]:
        warm = None if self.warm_learner is None else self.warm_learner.state()
        return {
            **super().state(),
            "warm_start": warm,
            "warm_examples": self.warm_examples,
            "start": self.start,
            "barren": self.barren,
            "failures": self.failures,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        super().restore_state(state)
        self.start = state["start"]
        self.warm_examples = int(state["warm_examples"])
        self.barren, self.failures = int(state["barren"]), int(state["failures"])
        if state["warm_start"] is None:
            self.warm_learner = None
        else:
            assert self.warm_learner is not None
            self.warm_learner.restore(state["warm_start"])
