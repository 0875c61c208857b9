"""Milliseconds per SAC gradient step: 17 observations, 6 actions, networks of 256-256, batch 256.

- msrl_accel, update: `SAC.update` on a given batch: noise, the compiled step (critics, actor,
  temperature, targets), metrics and temporal-difference errors.
- msrl_accel, step: that, and drawing the batch from a replay of 100,000 transitions.
- torch, eager: the same step on a given batch as CleanRL's sac_continuous_action.py writes it,
  with the Gaussian's log-probability in closed form and a fused target update.
- stable-baselines3, sbx: the whole of their `train`, which draws the batch from a replay of the
  same size.

Every contestant may use all cores. They are processes of their own and take turns; a process times
several blocks of steps after a warm-up (compilation is in it) and gives their median. Ratios are
taken round by round.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from _report import (
    Contestant,
    begin,
    finish,
    make_parser,
    median_and_range,
    ours_set_options,
    positive_int,
    present,
    run_child,
    table,
)

CONTESTANTS = {
    "ours": Contestant("msrl_accel", "msrl_accel", peer=False),
    "torch": Contestant("torch, eager", "torch"),
    "sb3": Contestant("stable-baselines3, train", "stable-baselines3"),
    "sbx": Contestant("sbx, train", "sbx-rl"),
}
LABELS = {
    "update": "msrl_accel, update",
    "step": "msrl_accel, step",
    "torch": "torch, eager",
    "sb3": "stable-baselines3, train",
    "sbx": "sbx, train",
}
OBSERVATIONS, ACTIONS, WIDTH, BATCH, TRANSITIONS = 17, 6, 256, 256, 100_000
OBSERVATION_SPACE = gym.spaces.Box(-np.inf, np.inf, (OBSERVATIONS,), np.float64)
ACTION_SPACE = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
WARM_UP = 50


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--rounds", type=positive_int, default=5, help="turns of each contestant")
    p.add_argument("--blocks", type=positive_int, default=9, help="timed blocks in a turn")
    p.add_argument("--steps", type=positive_int, default=60, help="gradient steps of a block")
    p.add_argument(
        "--per-call", type=positive_int, default=1, help="gradient steps of a call of msrl_accel's"
    )
    return p


class Stub(gym.Env):  # type: ignore[type-arg]
    """Spaces without a simulator."""

    observation_space, action_space = OBSERVATION_SPACE, ACTION_SPACE

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(OBSERVATIONS), {}

    def step(self, action: Any) -> Any:
        return np.zeros(OBSERVATIONS), 0.0, False, False, {}


def transitions(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Random ones, of the sizes and ranges of HalfCheetah."""
    return {
        "observations": rng.standard_normal((rows, OBSERVATIONS)),
        "actions": rng.uniform(-1, 1, (rows, ACTIONS)).astype(np.float32),
        "rewards": rng.standard_normal(rows).astype(np.float32),
        "next_observations": rng.standard_normal((rows, OBSERVATIONS)),
    }


def per_step(function: Callable[[], Any], args: argparse.Namespace, steps: int = 1) -> float:
    """Median milliseconds of a gradient step over the blocks; a call makes `steps` of them."""
    calls = max(1, args.steps // steps)
    for _ in range(max(1, WARM_UP // steps)):
        function()
    seconds = []
    for _ in range(args.blocks):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        seconds.append((time.perf_counter() - start) / (calls * steps))
    return 1e3 * statistics.median(seconds)


def measure_ours(args: argparse.Namespace) -> dict[str, float]:
    from msrl_accel.algorithms.sac import SAC
    from msrl_accel.config import build_parser, config_from_args
    from msrl_accel.device import set_up
    from msrl_accel.replay import ReplayBuffer
    from msrl_accel.spaces import PolicySpec

    words = ["--algo", "sac", "--env", "Stub", "--no-tuned"]
    words += ["--set", f"policy.hidden_sizes=[{WIDTH},{WIDTH}]"]
    words += ["--set", f"sac.batch_size={BATCH}", "--n-envs", str(args.per_call)]
    config = config_from_args(build_parser().parse_args([*words, *ours_set_options(args, "--set")]))
    set_up(config.runtime)
    spec = PolicySpec.from_spaces(OBSERVATION_SPACE, ACTION_SPACE)
    sac: Any = SAC(config, spec)
    rng = np.random.default_rng(0)
    n = 1000  # environments: fills the replay in a few calls
    replay = ReplayBuffer(spec, TRANSITIONS, n, gamma=0.99)
    for _ in range(TRANSITIONS // n):
        t = transitions(rng, n)
        replay.add(
            spec.cast((t["observations"],)),
            t["actions"],
            t["rewards"].astype(np.float64),
            spec.cast((t["next_observations"],)),
            *(np.zeros(n, bool), np.zeros(n, bool), np.ones(n, bool)),
        )
    k = args.per_call
    batch = replay.sample(rng, BATCH, k)
    return {
        "update": per_step(lambda: sac.update(batch, 0.0), args, k),
        "step": per_step(lambda: sac.update(replay.sample(rng, BATCH, k), 0.0), args, k),
    }


def measure_torch(args: argparse.Namespace) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        hidden = [nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))

    actor = mlp(OBSERVATIONS, 2 * ACTIONS)
    critics = nn.ModuleList(mlp(OBSERVATIONS + ACTIONS, 1) for _ in range(2))
    targets = copy.deepcopy(critics)
    log_alpha = torch.zeros(1, requires_grad=True)
    actor_adam, critic_adam, alpha_adam = (
        torch.optim.Adam(p, lr=3e-4)
        for p in (actor.parameters(), critics.parameters(), [log_alpha])
    )
    t = transitions(np.random.default_rng(0), BATCH)
    s, a, s2 = (
        torch.as_tensor(t[k], dtype=torch.float32)
        for k in ("observations", "actions", "next_observations")
    )
    r, not_done = torch.as_tensor(t["rewards"])[:, None], torch.ones(BATCH, 1)

    def sample(observations: Any) -> tuple[Any, Any]:
        mean, log_std = actor(observations).chunk(2, 1)
        log_std = log_std.clamp(-20, 2)
        noise = torch.randn_like(mean)
        x = mean + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.9189385
        log_prob = log_prob - 2 * (0.6931472 - x - F.softplus(-2 * x))
        return torch.tanh(x), log_prob.sum(1, keepdim=True)

    def smaller(networks: Any, observations: Any, actions: Any) -> Any:
        x = torch.cat([observations, actions], 1)
        return torch.min(networks[0](x), networks[1](x))

    def step() -> None:
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            next_action, next_log_prob = sample(s2)
            value = smaller(targets, s2, next_action) - alpha * next_log_prob
            y = r + 0.99 * not_done * value
        x = torch.cat([s, a], 1)
        critic_loss = 0.5 * sum(F.mse_loss(critic(x), y) for critic in critics)
        critic_adam.zero_grad()
        critic_loss.backward()
        critic_adam.step()
        action, log_prob = sample(s)
        actor_loss = (alpha * log_prob - smaller(critics, s, action)).mean()
        actor_adam.zero_grad()
        actor_loss.backward()
        actor_adam.step()
        alpha_loss = -(log_alpha * (log_prob.detach() - ACTIONS)).mean()
        alpha_adam.zero_grad()
        alpha_loss.backward()
        alpha_adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.005)

    return {"torch": per_step(step, args)}


def fill(buffer: Any) -> None:
    """Random transitions in a replay of stable-baselines3."""
    t = transitions(np.random.default_rng(0), TRANSITIONS)
    for i in range(TRANSITIONS):
        buffer.add(
            t["observations"][i],
            t["next_observations"][i],
            t["actions"][i],
            t["rewards"][i],
            np.zeros(1, bool),
            [{}],
        )


def measure_sb3(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import Logger

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = SAC("MlpPolicy", Stub(), buffer_size=TRANSITIONS, device="cpu")
    model.set_logger(Logger(None, []))
    fill(model.replay_buffer)
    return {"sb3": per_step(lambda: model.train(1, BATCH), args)}


def measure_sbx(args: argparse.Namespace) -> dict[str, float]:
    import jax
    from sbx import SAC
    from stable_baselines3.common.logger import Logger

    model: Any = SAC("MlpPolicy", Stub(), buffer_size=TRANSITIONS, device="cpu")
    model.set_logger(Logger(None, []))
    fill(model.replay_buffer)

    def step() -> None:
        model.train(1, BATCH)
        jax.block_until_ready(model.policy.actor_state.params)

    return {"sbx": per_step(step, args)}


MEASURE: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "ours": measure_ours,
    "torch": measure_torch,
    "sb3": measure_sb3,
    "sbx": measure_sbx,
}


def report(results: dict[str, list[float]]) -> str:
    """Table of medians over rounds, with the ratio to each peer round by round."""
    peers = [name for name in ("torch", "sb3", "sbx") if name in results]
    rows = []
    for name, times in results.items():
        ratios = [
            median_and_range([a / b for a, b in zip(times, results[peer])], digits=2)
            for peer in peers
        ]
        rows.append([LABELS[name], median_and_range(times, digits=2), *ratios])
    header = ["", "ms/step, median (range)", *[f"ratio to {LABELS[peer]}" for peer in peers]]
    return table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps(MEASURE[args.contestant](args)))
        return
    facts = begin(args, ["torch", "stable-baselines3", "sbx-rl", "jax", "numpy"])
    chosen = present(CONTESTANTS, args.peer_python)
    results: dict[str, list[float]] = {}
    for round_ in range(args.rounds):
        for name, contestant in chosen.items():
            python = args.peer_python if contestant.peer else sys.executable
            options = ["--contestant", name, "--blocks", str(args.blocks)]
            options += ["--steps", str(args.steps), "--per-call", str(args.per_call)]
            measured = run_child(python, __file__, [*options, *ours_set_options(args)])
            for key, value in measured.items():
                results.setdefault(key, []).append(value)
                print(f"round {round_ + 1}: {LABELS[key]}: {value:,.2f} ms", flush=True)
    print(f"\nOne SAC gradient step of {BATCH} rows\n")
    print(report(results))
    finish(args, facts, results)


if __name__ == "__main__":
    main()
