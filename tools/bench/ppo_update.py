"""Microseconds per PPO minibatch: 256 rows of CartPole-v1, separate 64-64 tanh actor and critic.

- msrl_accel, graph: the compiled update alone, all minibatches in one call: gathering rows,
  forward, loss, backward, norm clipping, Adam, recording what the metrics need.
- msrl_accel, whole: `PPO.update`: that, and on the host GAE, shuffling, the standardisation of
  advantages, and all metrics.
- torch, cleanrl: the same work eagerly as CleanRL's ppo.py writes it: gathering, standardising,
  `Categorical`, clipped loss, value loss, entropy, approx_kl and clip fraction, backward,
  `clip_grad_norm_`, Adam.
- torch, lean: the same with plain log_softmax instead of `Categorical` (fewer operators).

One torch thread. The graph's number leaves out the standardisation, which torch's has; the whole
has everything. Contestants are processes of their own and take turns; a process times several
blocks after a warm-up (compilation is in it) and gives their median. Ratios are taken round by
round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

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
    untuned_config,
)

CONTESTANTS = {
    "ours": Contestant("msrl_accel", "msrl_accel", peer=False),
    "cleanrl": Contestant("torch, cleanrl", "torch"),
    "lean": Contestant("torch, lean", "torch"),
}
LABELS = {
    "graph": "msrl_accel, graph",
    "whole": "msrl_accel, whole",
    "cleanrl": "torch, cleanrl",
    "lean": "torch, lean",
}
N_STEPS, N_ENVS, BATCH, CLIP = 256, 8, 256, 0.2
PER_EPOCH = N_STEPS * N_ENVS // BATCH


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--rounds", type=positive_int, default=4, help="turns of each contestant")
    p.add_argument("--blocks", type=positive_int, default=9, help="timed blocks in a turn")
    p.add_argument("--epochs", type=positive_int, default=40, help=f"x {PER_EPOCH}: a block")
    return p


class TimedCell:
    """Stands in for a compiled update and adds up the seconds spent in its calls."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.seconds = 0.0

    def __call__(self, *inputs: Any) -> Any:
        start = time.perf_counter()
        output = self.cell(*inputs)
        output.asnumpy()  # waits for the graph
        self.seconds += time.perf_counter() - start
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cell, name)


def measure_ours(args: argparse.Namespace) -> dict[str, float]:
    import gymnasium as gym

    from msrl_accel.algorithms.ppo import PPO
    from msrl_accel.device import set_up
    from msrl_accel.spaces import PolicySpec
    from msrl_accel.trajectories import Trajectories

    env = gym.make("CartPole-v1")
    config = untuned_config(
        "CartPole-v1", N_ENVS, args, n_steps=N_STEPS, n_epochs=args.epochs, batch_size=BATCH
    )
    set_up(config.runtime)
    ppo: Any = PPO(config, PolicySpec.from_spaces(env.observation_space, env.action_space))
    graph = ppo.minibatches.graph = TimedCell(ppo.minibatches.graph)
    rng = np.random.default_rng(0)
    shape = (N_STEPS, N_ENVS)
    values = rng.standard_normal(shape).astype(np.float32)
    trajectories = Trajectories(
        observations=(rng.standard_normal((*shape, 4)).astype(np.float32),),
        raw_actions=rng.integers(0, 2, shape).astype(np.int32),
        log_probs=rng.normal(-0.7, 0.1, shape).astype(np.float32),
        values=values,
        rewards=np.ones(shape),
        next_values=np.roll(values, -1, axis=0),
        terminated=rng.random(shape) < 0.02,
        truncated=np.zeros(shape, bool),
        valid=np.ones(shape, bool),
        versions=np.zeros(shape, np.int32),
    )
    ppo.update(trajectories, 0.0, rng)
    inside, whole = [], []
    for _ in range(args.blocks):
        graph.seconds, start = 0.0, time.perf_counter()
        ppo.update(trajectories, 0.0, rng)
        whole.append(time.perf_counter() - start)
        inside.append(graph.seconds)
    scale = 1e6 / (args.epochs * PER_EPOCH)
    return {"graph": statistics.median(inside) * scale, "whole": statistics.median(whole) * scale}


def measure_torch(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from torch import nn
    from torch.distributions import Categorical

    torch.set_num_threads(1)

    def mlp(outputs: int) -> nn.Sequential:
        hidden = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        return nn.Sequential(*hidden, nn.Linear(64, outputs))

    def categorical(logits: Any, actions: Any) -> tuple[Any, Any]:
        distribution = Categorical(logits=logits)
        return distribution.log_prob(actions), distribution.entropy()

    def plain(logits: Any, actions: Any) -> tuple[Any, Any]:
        log_probs = torch.log_softmax(logits, -1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(1, actions[:, None])[:, 0], entropy

    log_prob_entropy = categorical if args.contestant == "cleanrl" else plain
    actor, critic = mlp(2), mlp(1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)
    n = N_STEPS * N_ENVS
    observations, actions = torch.randn(n, 4), torch.randint(0, 2, (n,))
    old_log_probs, advantages, returns = torch.randn(n) * 0.1 - 0.7, torch.randn(n), torch.randn(n)
    clip_fractions = []

    def minibatch(rows: Any) -> None:
        new_log_prob, entropy = log_prob_entropy(actor(observations[rows]), actions[rows])
        log_ratio = new_log_prob - old_log_probs[rows]
        ratio = log_ratio.exp()
        with torch.no_grad():
            ((ratio - 1) - log_ratio).mean()  # approx_kl
            clip_fractions.append(((ratio - 1.0).abs() > CLIP).float().mean().item())
        advantage = advantages[rows]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        plain_loss = -advantage * ratio
        clipped_loss = -advantage * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        value_loss = ((critic(observations[rows]).view(-1) - returns[rows]) ** 2).mean()
        loss = torch.max(plain_loss, clipped_loss).mean() - 0.0 * entropy.mean() + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()

    def block() -> float:
        start = time.perf_counter()
        for _ in range(args.epochs):
            for rows in torch.randperm(n).split(BATCH):
                minibatch(rows)
        return time.perf_counter() - start

    block()
    scale = 1e6 / (args.epochs * PER_EPOCH)
    return {args.contestant: statistics.median(block() for _ in range(args.blocks)) * scale}


MEASURE: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "ours": measure_ours,
    "cleanrl": measure_torch,
    "lean": measure_torch,
}


def report(results: dict[str, list[float]]) -> str:
    """Table of medians over rounds, with the ratio to each torch step round by round."""
    peers = [name for name in ("cleanrl", "lean") if name in results]
    rows = []
    for name, times in results.items():
        ratios = [
            median_and_range([a / b for a, b in zip(times, results[peer])], digits=2)
            for peer in peers
        ]
        rows.append([LABELS[name], median_and_range(times), *ratios])
    header = ["", "us/minibatch, median (range)", *[f"ratio to {LABELS[peer]}" for peer in peers]]
    return table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps(MEASURE[args.contestant](args)))
        return
    facts = begin(args, ["torch", "numpy"])
    chosen = present(CONTESTANTS, args.peer_python)
    results: dict[str, list[float]] = {}
    for round_ in range(args.rounds):
        for name, contestant in chosen.items():
            python = args.peer_python if contestant.peer else sys.executable
            options = ["--contestant", name, "--blocks", str(args.blocks)]
            options += ["--epochs", str(args.epochs), *ours_set_options(args)]
            measured = run_child(python, __file__, options)
            for key, value in measured.items():
                results.setdefault(key, []).append(value)
                print(f"round {round_ + 1}: {LABELS[key]}: {value:,.0f} us", flush=True)
    print(f"\nOne PPO minibatch of {BATCH} rows\n")
    print(report(results))
    finish(args, facts, results)


if __name__ == "__main__":
    main()
