"""A process that generates completions for GRPO with the learner's newest weights.

Problems do not travel: a slot of the queue tells the seed they were drawn with, and the learner
draws the same ones again. What travels are token ids, log-probabilities and versions.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel.pipeline.heartbeat import Heartbeat, Stage
from msrl_accel.pipeline.placement import Place
from msrl_accel.pipeline.shared_queue import Producer, ProducerHandle, Slot
from msrl_accel.pipeline.worker import heartbeat_of, run_guarded
from msrl_accel.publish import StoreHandle, WeightStore
from msrl_accel.shared_memory import ArraySpec, BlockHandle, SharedBlock

if TYPE_CHECKING:
    from msrl_accel.config import TrainConfig
    from msrl_accel.lm.generation import Completions

_POLL_SECONDS = 0.2
SEED_WORDS = 4
"""int64 numbers that seed the problems and the noise of a slot."""
_ARRAYS = ("tokens", "lengths", "log_probs", "versions", "kept")


@dataclass(frozen=True)
class GenerationTask:
    """All that a worker's process is given. Unpickling it must not import MindSpore."""

    index: int
    attempt: int
    """How often it was started before; each attempt draws other problems and noise."""
    config: TrainConfig
    description: str
    """Folder with configuration and tokenizer of the model."""
    place: Place
    weights: StoreHandle
    queue: ProducerHandle
    heartbeats: BlockHandle
    report: str


def run_generation(task: GenerationTask) -> None:
    """Target of the process."""
    run_guarded(task.report, task.place, lambda: _Worker(task).run())


def slot_layout(n: int, longest: int, kept: int) -> list[ArraySpec]:
    """Arrays of one slot: `n` completions of at most `longest` tokens, `kept` tokens each."""
    arrays: dict[str, np.ndarray] = {
        "tokens": np.empty((n, longest), np.int32),
        "lengths": np.empty(n, np.int32),
        "log_probs": np.empty((n, longest), np.float32),
        "versions": np.empty((n, longest), np.int64),
        "kept": np.empty((n, longest, max(kept, 1)), np.int32),
        "ended": np.empty(n, np.bool_),
        "seed": np.empty(SEED_WORDS, np.int64),
        "prompts": np.empty(1, np.int64),
        "seconds": np.empty(1, np.float64),
    }
    return [ArraySpec.of(name, array) for name, array in arrays.items()]


def write_completions(slot: Slot, c: Completions) -> None:
    """Fill a slot's arrays of completions."""
    slot.arrays["ended"][:] = c.stop == "eos"
    for name in _ARRAYS:
        value = getattr(c, name)
        if value is None:
            continue
        if value.ndim > 1:
            slot.arrays[name][:, : value.shape[1]] = value
        else:
            slot.arrays[name][:] = value


def read_completions(slot: Slot, group_size: int, has_kept: bool) -> Completions:
    """Copies of a slot's completions."""
    from msrl_accel.lm.generation import Completions
    from msrl_accel.lm.partial import trimmed

    found: dict[str, Any] = {name: slot.arrays[name].copy() for name in _ARRAYS}
    n = len(found["lengths"])
    if not has_kept:
        found["kept"] = None
    return trimmed(
        Completions(
            stop=np.where(slot.arrays["ended"], "eos", "length"),
            prompt_index=np.arange(n, dtype=np.int32) // group_size,
            version=0,
            **found,
        )
    )


def generators(seed: np.ndarray) -> tuple[np.random.Generator, np.random.Generator]:
    """Of a slot's problems, and of its noise."""
    problems, noise = np.random.SeedSequence(seed.tolist()).spawn(2)
    return np.random.default_rng(problems), np.random.default_rng(noise)


def prompts_digest(prompts: Sequence[np.ndarray]) -> int:
    """Tells whether learner and worker have drawn the same problems."""
    return zlib.crc32(b"|".join(np.asarray(p, "<i4").tobytes() for p in prompts))


class _Worker:
    """Generates into slots of the queue until it is closed."""

    def __init__(self, task: GenerationTask) -> None:
        from msrl_accel.algorithms.grpo import GRPOConfig
        from msrl_accel.device import set_up
        from msrl_accel.envs.text import make_task
        from msrl_accel.lm.model import CausalLM
        from msrl_accel.lm.opening import load_description
        from msrl_accel.lm.partial import PartialGenerator
        from msrl_accel.lm.prompts import PromptEncoder

        block = SharedBlock.attach(task.heartbeats)
        self.heartbeat: Heartbeat = heartbeat_of(block, task.index)
        self.heartbeat.beat(Stage.START)
        options = task.config.algorithm
        assert isinstance(options, GRPOConfig)
        self.task, self.options = task, options
        set_up(task.config.runtime)
        opened = load_description(task.description)
        self.encoder = PromptEncoder(opened.tokenizer, options.prompt, options.system_prompt)
        self.problems = make_task(task.config.env, **task.config.env_kwargs)
        self.model = CausalLM(opened.config, seed=None)
        self.store = WeightStore.attach(task.weights)
        self.queue = Producer(task.queue)
        self.version = -1
        self.delivered = 0
        self.generator = PartialGenerator(
            self.model,
            options.max_new_tokens,
            options.partial_tokens,
            options.rollout_rows,
            options.sampling,
            self.follow,
        )

    def run(self) -> None:
        while True:
            slot = self.queue.try_acquire(_POLL_SECONDS)
            # The first completions compile their graphs, which is part of the start.
            self.heartbeat.beat(Stage.QUEUE if self.delivered else Stage.START)
            if slot is not None:
                self.fill(slot)
                self.queue.commit(slot)
                self.delivered += 1

    def fill(self, slot: Slot) -> None:
        start = time.monotonic()
        task, options = self.task, self.options
        seed = np.array([task.config.seed, task.index, task.attempt, self.delivered], np.int64)
        problem_rng, noise_rng = generators(seed)
        problems = self.encoder.draw(
            self.problems, problem_rng, options.prompts_per_iteration, options.max_prompt_tokens
        )
        prompts = [self.encoder.prompt(problem) for problem in problems]
        write_completions(
            slot,
            self.generator.generate(
                prompts, options.group_size, noise_rng, self.encoder.tokenizer.eos_ids
            ),
        )
        slot.arrays["seed"][:] = seed
        slot.arrays["prompts"][0] = prompts_digest(prompts)
        slot.arrays["seconds"][0] = time.monotonic() - start

    def follow(self) -> int:
        """Take newer weights where there are some; the version that the model then has."""
        self.heartbeat.beat(Stage.INFERENCE if self.delivered else Stage.START)
        newer = self.store.read(newer_than=self.version)
        if newer is not None:
            self.version = newer[0]
            self.model.load_arrays(newer[1])
        return self.version
