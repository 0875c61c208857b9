"""PPO in float64 NumPy, written from the paper, to compare the compiled update with."""

from __future__ import annotations

import numpy as np
from policy_helpers import (
    gae_by_definition,
    log_softmax,
    numerical_gradient,
    vtrace_by_definition,
)

from msrl_accel.algorithms.ppo import LossInputs
from msrl_accel.trajectories import Trajectories

T, N = 7, 3  # steps and environments of the trajectories


def numpy_loss(log_prob, entropy, value, inputs, clip, config, importance=None):
    """Eq. 7 and 9 of the paper, one row at a time; eq. 3 of the decoupled one with `importance`."""
    value_clip = config.value_clip_range
    total = 0.0
    for b in range(len(log_prob)):
        ratio = np.exp(log_prob[b] - inputs.old_log_prob[b])
        advantage, target = inputs.advantage[b], inputs.value_target[b]
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        objective = min(ratio * advantage, clipped * advantage)
        if importance is not None:
            objective *= importance[b]
        squared_error = (value[b] - target) ** 2
        if value_clip is not None:
            old = inputs.old_value[b]
            near = old + min(max(value[b] - old, -value_clip), value_clip)
            squared_error = max(squared_error, (near - target) ** 2)
        row = -objective + config.vf_coef * squared_error - config.ent_coef * entropy[b]
        row += config.kl_coef * (ratio - 1 - np.log(ratio))
        total += inputs.weight[b] * row
    return total


class NumpyPPO:
    """PPO of a policy with two torsos of one tanh layer, gradients by finite differences."""

    def __init__(self, ppo):
        self.c = ppo.config
        self.kind = ppo.policy.spec.action.kind
        self.names = [s.name for s in ppo.policy.weight_specs]
        arrays = ppo.policy.arrays()
        self.shapes = [arrays[name].shape for name in self.names]
        self.flat = np.concatenate([arrays[n].astype(np.float64).ravel() for n in self.names])
        self.m, self.v, self.t = np.zeros_like(self.flat), np.zeros_like(self.flat), 0

    def arrays(self, flat):
        ends = np.cumsum([int(np.prod(s)) for s in self.shapes])[:-1]
        return {
            n: part.reshape(s) for n, part, s in zip(self.names, np.split(flat, ends), self.shapes)
        }

    def evaluate(self, flat, x, raw):
        w = self.arrays(flat)
        actor, critic = (
            np.tanh(x @ w["torso.0.weight"][k].T + w["torso.0.bias"][k]) for k in range(2)
        )
        head = actor @ w["actor.weight"].T + w["actor.bias"]
        value = (critic @ w["critic.weight"].T + w["critic.bias"])[:, 0]
        if self.kind == "continuous":
            z = (raw - head) / np.exp(w["log_std"])
            log_prob = (-0.5 * z**2 - w["log_std"] - 0.5 * np.log(2 * np.pi)).sum(axis=1)
            entropy = np.full(len(x), (w["log_std"] + 0.5 * np.log(2 * np.pi * np.e)).sum())
        else:
            log_p = log_softmax(head)
            log_prob = log_p[np.arange(len(x)), raw]
            entropy = -(np.exp(log_p) * log_p).sum(axis=1)
        return log_prob, entropy, value

    def update(self, t, clip, learning_rate, rng, sample_weights=None):
        c = self.c
        x = t.observations[0].reshape(-1, 3).astype(np.float64)
        raw = t.raw_actions.reshape(len(x), *t.raw_actions.shape[2:])
        behaviour, old_value = (a.astype(np.float64).ravel() for a in (t.log_probs, t.values))
        old_log_prob, next_values = behaviour, t.next_values.astype(np.float64)
        importance = np.ones(len(x))
        if c.objective != "clipped":
            old_log_prob, _, old_value = self.evaluate(self.flat, x, raw)
            next_values = values_that_follow(t, old_value.reshape(T, N))
        steps = (t.rewards, old_value.reshape(T, N), next_values)
        ends = (t.terminated, t.truncated)
        if c.objective == "vtrace":
            log_ratio = (old_log_prob - behaviour).reshape(T, N)
            advantages, _ = vtrace_by_definition(
                *steps, log_ratio, *ends, t.valid, c.gamma, c.gae_lambda, 1.0, 1.0
            )
        else:
            advantages = gae_by_definition(*steps, *ends, c.gamma, c.gae_lambda)
        advantages = advantages.ravel()
        if c.objective == "decoupled":
            importance = np.minimum(np.exp(old_log_prob - behaviour), c.importance_cap)
        usable, row_weights = t.valid.ravel(), np.ones(len(x))
        if sample_weights is not None:
            row_weights = sample_weights.ravel()
            usable = usable & (row_weights > 0)
        seen = []
        for _ in range(c.n_epochs):
            order = rng.permutation(np.flatnonzero(usable).astype(np.int32))
            for start in range(0, len(order), c.batch_size):
                rows = order[start : start + c.batch_size]
                a = advantages[rows]
                if len(rows) > 1:
                    a = (a - a.mean()) / (a.std(ddof=1) + 1e-8)
                inputs = LossInputs(
                    old_log_prob[rows],
                    old_value[rows],
                    a,
                    np.full(len(rows), np.nan),  # the definition clips the ratio itself
                    advantages[rows] + old_value[rows],
                    row_weights[rows] / row_weights[rows].sum(),
                )
                result = self.minibatch(
                    x[rows], raw[rows], inputs, clip, learning_rate, importance[rows]
                )
                seen.append(result)
                if c.target_kl is not None and seen[-1]["approx_kl"] > 1.5 * c.target_kl:
                    return seen
        return seen

    def minibatch(self, x, raw, inputs, clip, learning_rate, importance):
        c = self.c

        def loss(flat):
            terms = self.evaluate(flat, x, raw)
            return numpy_loss(*terms, inputs, clip, c, importance)

        log_prob, entropy, value = self.evaluate(self.flat, x, raw)
        ratio = np.exp(log_prob - inputs.old_log_prob)
        gradient = numerical_gradient(loss, self.flat)
        norm = np.linalg.norm(gradient)
        gradient *= min(1.0, c.max_grad_norm / (norm + 1e-6))
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m_hat, v_hat = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        self.flat = self.flat - learning_rate * m_hat / (np.sqrt(v_hat) + c.adam_epsilon)
        objective = importance * np.minimum(
            ratio * inputs.advantage, np.clip(ratio, 1 - clip, 1 + clip) * inputs.advantage
        )

        def mean(values):
            return (values * inputs.weight).sum()

        return {
            "policy_loss": mean(-objective),
            "value_loss": mean((value - inputs.value_target) ** 2),
            "entropy": mean(entropy),
            "approx_kl": mean(ratio - 1 - np.log(ratio)),
            "clip_fraction": mean(np.abs(ratio - 1) > clip),
            "ratio_error": np.abs(ratio - 1).max(),
            "grad_norm": norm,
        }


def values_that_follow(t, values):
    """Values of the next steps; as collected where an episode, or the trajectory, ends."""
    result = t.next_values.astype(np.float64)
    for n in range(N):
        for k in range(T - 1):
            if not (t.terminated[k, n] or t.truncated[k, n]) and t.valid[k + 1, n]:
                result[k, n] = values[k + 1, n]
    return result


def random_trajectories(ppo, seed, invalid=0):
    """Like those of a policy a few updates ago, so that the clips take part."""
    rng = np.random.default_rng(seed)
    spec = ppo.policy.spec
    x = rng.normal(size=(T, N, 3)).astype(np.float32)
    if spec.action.kind == "continuous":
        raw = rng.normal(size=(T, N, 2)).astype(np.float32)
    else:
        raw = rng.integers(0, 3, (T, N)).astype(np.int32)
    reference = NumpyPPO(ppo)
    log_prob, _, value = reference.evaluate(
        reference.flat, x.reshape(-1, 3), raw.reshape(T * N, *raw.shape[2:])
    )
    valid = np.ones(T * N, bool)
    valid[rng.permutation(T * N)[:invalid]] = False
    return Trajectories(
        observations=(x,),
        raw_actions=raw,
        log_probs=(log_prob + rng.normal(0, 0.2, T * N)).reshape(T, N).astype(np.float32),
        values=(value + rng.normal(0, 0.3, T * N)).reshape(T, N).astype(np.float32),
        rewards=rng.normal(size=(T, N)),
        next_values=rng.normal(size=(T, N)).astype(np.float32),
        terminated=rng.random((T, N)) < 0.15,
        truncated=rng.random((T, N)) < 0.15,
        valid=valid.reshape(T, N),
        versions=np.zeros((T, N), np.int32),
    )
