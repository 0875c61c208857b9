"""One process of the data-parallel tests: updates on its part of known trajectories."""

from __future__ import annotations

import sys

import numpy as np

from msrl_accel.config import resolve_config
from msrl_accel.spaces import PolicySpec
from msrl_accel.trajectories import Trajectories

STEPS, ENVS, UPDATES = 8, 4, 2


def config(n_envs, batch_size, **ppo):
    values = {f"ppo.{key}": value for key, value in ppo.items()}
    return resolve_config(
        algo="ppo",
        env="CartPole-v1",
        tuned=False,
        n_envs=n_envs,
        overrides={
            "ppo.n_steps": STEPS,
            "ppo.batch_size": batch_size,
            "ppo.n_epochs": 1,
            "policy.hidden_sizes": [16],
            **values,
        },
    )


def spec():
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    return PolicySpec.from_spaces(env.observation_space, env.action_space)


def trajectories(seed):
    """Of all environments; some steps of the last ones are not valid."""
    rng = np.random.default_rng(seed)
    t = Trajectories.empty(spec(), STEPS, ENVS)
    t.observations[0][:] = rng.standard_normal(t.observations[0].shape)
    t.raw_actions[:] = rng.integers(0, 2, t.raw_actions.shape)
    t.log_probs[:] = np.log(0.5) + 0.1 * rng.standard_normal(t.log_probs.shape)
    t.values[:] = rng.standard_normal(t.values.shape)
    t.next_values[:] = rng.standard_normal(t.values.shape)
    t.rewards[:] = rng.standard_normal(t.rewards.shape)
    t.terminated[:] = rng.random(t.terminated.shape) < 0.1
    t.truncated[:] = False
    t.valid[:] = True
    t.valid[2:5, ENVS - 1] = False
    t.versions[:] = 0
    return t


def part(t, columns):
    from msrl_accel.pipeline.slots import take_columns

    return take_columns(t, columns)


def train(algorithm, columns):
    """Moments after the first update, weights and gradient norms after all."""
    rng = np.random.default_rng(0)
    result = {}
    for update in range(UPDATES):
        algorithm.update(part(trajectories(update), columns), 0.0, rng)
        graph = algorithm.minibatches.graph
        result[f"norms{update}"] = graph.norms.asnumpy().copy()
        result[f"moment{update}"] = graph.optimizer.moment1.asnumpy().copy()
    for name, x in algorithm.policy.arrays().items():
        result[f"weights/{name}"] = x.copy()
    return result


def main(folder, accumulate):
    from msrl_accel.algorithms.ppo import PPO
    from msrl_accel.parallel.accumulate import AccumulatingGraph
    from msrl_accel.parallel.collectives import join

    whole = config(ENVS, STEPS * ENVS, target_kl=0.05)
    processes = join(whole.runtime)
    local = ENVS // processes.size
    algorithm = PPO(config(local, STEPS * local, target_kl=0.05), spec())
    if processes.rank:  # what the broadcast has to put right
        arrays = algorithm.policy.arrays()
        algorithm.policy.load_arrays({name: x + 1 for name, x in arrays.items()})
    processes.broadcast(list(algorithm.policy.weights))
    if accumulate > 1:
        minibatches = algorithm.minibatches
        minibatches.graph = AccumulatingGraph(minibatches.graph, accumulate)
    columns = slice(processes.rank * local, (processes.rank + 1) * local)
    numbers = np.array([1e9 + 1 / 3, np.nan, processes.rank])
    np.savez(
        f"{folder}/{processes.rank}.npz",
        gathered=processes.gather(numbers),
        most=processes.max(7 + processes.rank),
        **train(algorithm, columns),
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
