"""SAC in float64 NumPy, written from the paper, to compare the compiled update with.

Gradients are central differences of the losses; the log-probability is SciPy's density of the
normal distribution with the change of variables of tanh.
"""

from __future__ import annotations

import numpy as np
from policy_helpers import numerical_gradient
from scipy import stats

from msrl_accel.critics import unfold


class Adam:
    """Kingma & Ba 2015, algorithm 1."""

    def __init__(self, size, learning_rate, epsilon):
        self.m, self.v, self.t = np.zeros(size), np.zeros(size), 0
        self.learning_rate, self.epsilon = learning_rate, epsilon

    def step(self, gradient):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m_hat, v_hat = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return -self.learning_rate * m_hat / (np.sqrt(v_hat) + self.epsilon)


class Vector:
    """Named arrays as one float64 vector."""

    def __init__(self, arrays):
        self.shapes = [np.shape(a) for a in arrays]
        self.flat = np.concatenate([np.ravel(a).astype(np.float64) for a in arrays])

    def split(self, flat):
        ends = np.cumsum([int(np.prod(s)) for s in self.shapes])[:-1]
        return [part.reshape(s) for part, s in zip(np.split(flat, ends), self.shapes)]


def squashed(mean, log_std, noise):
    """tanh of a Gaussian sample, and its log density [B] by the change of variables."""
    std = np.exp(log_std)
    x = mean + std * noise
    # log(1 - tanh^2) = -2 log cosh
    log_det = -2 * (np.logaddexp(x, -x) - np.log(2))
    return np.tanh(x), (stats.norm.logpdf(x, mean, std) - log_det).sum(axis=1)


class NumpySAC:
    """The state of `sac`, and its update."""

    def __init__(self, sac):
        self.c = c = sac.config
        self.activation = np.tanh if not sac.graph.critics.is_relu else lambda x: np.maximum(x, 0)
        self.normalizer = {
            k: v for k, v in sac.policy.arrays().items() if k.startswith("normalizer.")
        }
        self.names = [s.name for s in sac.policy.weight_specs]
        arrays = sac.policy.arrays()
        self.actor = Vector([arrays[n] for n in self.names])
        self.critic = Vector(self.plain_critics(sac.graph.critic_weights))
        self.target = self.critic.flat.copy()
        self.log_alpha = float(sac.graph.log_alpha.asnumpy()[0])
        self.size = sac.policy.spec.action.size
        entropy = c.target_entropy
        self.target_entropy = -self.size if entropy is None else entropy
        settings = (c.learning_rate, c.adam_epsilon)
        self.adam = [Adam(n, *settings) for n in (len(self.actor.flat), len(self.critic.flat), 1)]

    @staticmethod
    def plain_critics(weights):
        return unfold([w.asnumpy() for w in weights])

    def features(self, observations):
        x = observations.astype(np.float64)
        if self.normalizer:
            mean = self.normalizer["normalizer.observation.mean"]
            x = np.clip((x - mean) * self.normalizer["normalizer.observation.inverse_std"], -10, 10)
        return x

    def act(self, flat, observations, noise):
        *hidden, weight, bias = self.actor.split(flat)
        x = self.features(observations)
        for w, b in zip(hidden[::2], hidden[1::2]):
            x = self.activation(x @ w.T + b)
        head = x @ weight.T + bias
        log_std = np.clip(head[:, self.size :], -20, 2)
        return squashed(head[:, : self.size], log_std, noise.astype(np.float64))

    def q(self, flat, observations, actions):
        """[2, B]"""
        *hidden, w0, b0, w1, b1 = self.critic.split(flat)
        values = []
        for member, (weight, bias) in enumerate(((w0, b0), (w1, b1))):
            x = np.concatenate([self.features(observations), actions], axis=1)
            for w, b in zip(hidden[::2], hidden[1::2]):
                x = self.activation(x @ w[member].T + b[member])
            values.append((x @ weight.T + bias)[:, 0])
        return np.stack(values)

    def step(self, observations, actions, rewards, next_observations, discounts, weights, noise):
        """One gradient step; what it saw: Q, y, log pi, Q of new actions."""
        alpha = np.exp(self.log_alpha)
        next_actions, next_log_prob = self.act(self.actor.flat, next_observations, noise[1])
        next_q = self.q(self.target, next_observations, next_actions).min(axis=0)
        y = rewards + discounts * (next_q - alpha * next_log_prob)

        def critic_loss(flat):
            q = self.q(flat, observations, actions)
            return sum(0.5 * np.mean(weights * (q[i] - y) ** 2) for i in range(2))

        seen_q = self.q(self.critic.flat, observations, actions)
        gradient = numerical_gradient(critic_loss, self.critic.flat, 1e-6)
        self.critic.flat = self.critic.flat + self.adam[1].step(gradient)

        def actor_loss(flat):
            new_actions, log_prob = self.act(flat, observations, noise[0])
            q = self.q(self.critic.flat, observations, new_actions).min(axis=0)
            return np.mean(alpha * log_prob - q)

        new_actions, log_prob = self.act(self.actor.flat, observations, noise[0])
        seen_new = self.q(self.critic.flat, observations, new_actions)
        gradient = numerical_gradient(actor_loss, self.actor.flat, 1e-6)
        self.actor.flat = self.actor.flat + self.adam[0].step(gradient)

        if self.c.temperature is None:
            # loss: -log_alpha * mean(log pi + target entropy)
            gradient = -np.mean(log_prob + self.target_entropy)
            self.log_alpha += float(self.adam[2].step(np.array([gradient]))[0])
        self.target = (1 - self.c.tau) * self.target + self.c.tau * self.critic.flat
        return seen_q, y, log_prob, seen_new

    def update(self, batch, noise):
        """All steps of a batch [k, B, ...] with noise [2, k, B, D]."""
        seen = []
        for i in range(len(batch.rewards)):
            seen.append(
                self.step(
                    batch.observations[0][i],
                    batch.actions[i],
                    batch.rewards[i],
                    batch.next_observations[0][i],
                    batch.discounts[i],
                    batch.weights[i],
                    noise[:, i],
                )
            )
        return seen
