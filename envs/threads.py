"""Environments in one thread each: for those that wait, on a simulator, a robot or a network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec

from msrl_accel.envs.base import (
    Observations,
    StepResult,
    VectorEnv,
    observation_names,
    split_observation,
)
from msrl_accel.envs.factory import EnvFactory
from msrl_accel.errors import EnvError


class ThreadVectorEnv(VectorEnv):
    """Steps environments at once in threads, all together (`step`) or each on its own.

    `send` starts the steps of some environments and `receive` gives those that have ended, so that
    a slow one keeps no other waiting. Python runs one thread at a time: environments that compute
    rather than wait gain nothing here.

    Args:
        env_id: name for messages.
        factories: one an environment; called here, in turn.
        timeout: seconds an environment may take to reset or step.
    """

    def __init__(self, env_id: str, factories: Sequence[EnvFactory], timeout: float) -> None:
        self.env_id = env_id
        self.num_envs = len(factories)
        self._timeout = timeout
        self._envs = [factory() for factory in factories]
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space
        observation_names(self.observation_space)  # refuse unsupported spaces now
        self._orders: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self._envs]
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._sent = np.full(self.num_envs, np.inf)  # when the pending order was given
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True, name=f"{env_id}-{i}")
            for i in range(self.num_envs)
        ]
        for thread in self._threads:
            thread.start()

    def reset(self, seed: int | None = None) -> Observations:
        self._drain()
        seeds: list[int | None] = [None] * self.num_envs
        if seed is not None:
            seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(self.num_envs)]
        for i in range(self.num_envs):
            self._order(i, ("reset", seeds[i]))
        outcomes = self._collect(self.num_envs)
        observations = _stack([outcomes[i] for i in range(self.num_envs)])
        self._check_observations(observations)
        return observations

    def step(self, actions: np.ndarray) -> StepResult:
        everyone = np.arange(self.num_envs)
        self.send(everyone, actions)
        return self.receive(self.num_envs)[1]

    def send(self, indices: np.ndarray, actions: np.ndarray) -> None:
        """Start a step of the environments `indices` [M] with actions [M, ...]."""
        for i, action in zip(indices.tolist(), actions):
            self._order(i, ("step", action))

    @property
    def under_way(self) -> int:
        """Environments whose step, or reset, has been started and not yet received."""
        return int(np.isfinite(self._sent).sum())

    def receive(self, at_least: int = 1) -> tuple[np.ndarray, StepResult]:
        """Wait for steps under way to end.

        Args:
            at_least: how many to wait for; any others that have ended come along.

        Returns:
            Indices [M] of their environments, ascending, and their outcomes, [M] rows.

        Raises:
            EnvError: an environment failed, or took longer than the timeout.
        """
        outcomes = self._collect(at_least)
        indices = np.array(sorted(outcomes))
        rows = [outcomes[i] for i in indices.tolist()]
        result = StepResult(
            observations=_stack([r[0] for r in rows]),
            next_observations=_stack([r[1] for r in rows]),
            rewards=np.array([r[2] for r in rows], np.float64),
            terminated=np.array([r[3] for r in rows], bool),
            truncated=np.array([r[4] for r in rows], bool),
            valid=np.ones(len(rows), bool),
        )
        return indices, self._checked(result, indices)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for orders in self._orders:
            orders.put(None)
        deadline = time.monotonic() + 3.0
        for thread, env in zip(self._threads, self._envs):
            thread.join(max(deadline - time.monotonic(), 0.0))
            if not thread.is_alive():  # a hung one is a daemon: it ends with the process
                env.close()

    def _order(self, index: int, order: tuple[str, Any]) -> None:
        self._sent[index] = time.monotonic()
        self._orders[index].put(order)

    def _collect(self, at_least: int) -> dict[int, Any]:
        """Outcomes by environment: at least so many, and whatever else has ended."""
        outcomes: dict[int, Any] = {}
        while True:
            try:
                if len(outcomes) >= at_least:
                    index, outcome = self._done.get_nowait()
                else:
                    left = self._sent.min() + self._timeout - time.monotonic()
                    index, outcome = self._done.get(timeout=max(left, 0.0))
            except queue.Empty:
                if len(outcomes) >= at_least:
                    return outcomes
                late = np.flatnonzero(time.monotonic() - self._sent >= self._timeout)
                raise EnvError(
                    f"{self.env_id}: environment {', '.join(map(str, late))} did not answer within "
                    f"{self._timeout:g} s (timeout); it hangs or is too slow"
                ) from None
            self._sent[index] = np.inf
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes[index] = outcome

    def _drain(self) -> None:
        """Wait for steps under way and forget them."""
        if self.under_way:
            self._collect(self.under_way)

    def _run(self, index: int) -> None:
        """One environment's thread."""
        env, orders = self._envs[index], self._orders[index]
        space = self.observation_space
        while True:
            order = orders.get()
            if order is None:
                return
            kind, value = order
            try:
                if kind == "reset":
                    self._done.put((index, split_observation(space, env.reset(seed=value)[0])))
                    continue
                observation, reward, terminated, truncated, _ = env.step(value)
                following = split_observation(space, observation)
                observations = following
                if terminated or truncated:
                    observations = split_observation(space, env.reset()[0])
                outcome = (observations, following, reward, bool(terminated), bool(truncated))
                self._done.put((index, outcome))
            except BaseException as error:  # raised again where the steps are received
                self._done.put((index, error))


def make_threads(
    env_id: str,
    spec: EnvSpec,
    num_envs: int,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> ThreadVectorEnv:
    """Environments in one thread each of this process."""
    factories = [EnvFactory(env_id, spec, kwargs, index) for index in range(num_envs)]
    return ThreadVectorEnv(env_id, factories, timeout)


def _stack(rows: Sequence[Observations]) -> Observations:
    return tuple(np.stack(entry) for entry in zip(*rows))
