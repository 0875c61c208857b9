"""n-step returns from a ring of transitions."""

from __future__ import annotations

import numpy as np


def n_step_returns(
    rewards: np.ndarray,
    terminated: np.ndarray,
    ended: np.ndarray,
    start: np.ndarray,
    newest: np.ndarray,
    stride: int,
    gamma: float,
    n: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Discounted rewards of up to n steps, and what to bootstrap with.

    The window of a transition ends after n steps, at the end of its episode, or at the newest
    transition of its environment, whichever comes first: with m steps in it,

        return = sum over j < m of gamma^j r_{t+j}
        discount = gamma^m, or 0 where the last step is terminal

    and the target is return + discount * V(successor of the last step).

    Args:
        rewards, terminated, ended: the rings, flat [entries]; an environment's next transition is
            `stride` entries on, modulo their number. `ended`: terminated, or cut.
        start: first transition of each window, [B].
        newest: the newest transition of the environment of each window, [B].

    Returns:
        returns float32 [B], discounts float32 [B], last transition of each window [B].
    """
    entries = len(rewards)
    last = start
    total = rewards.take(start).astype(np.float64)
    steps = np.ones(len(start), np.int64)
    for j in range(1, n):
        going = ~(ended.take(last) | (last == newest))
        following = last + stride
        following[following >= entries] -= entries
        last = np.where(going, following, last)
        total += np.where(going, gamma**j * rewards.take(last), 0.0)
        steps += going
    # A table, so that the powers are the same doubles whatever the shape of the batch.
    powers = np.array([gamma**j for j in range(n + 1)])
    discounts = np.where(terminated.take(last), 0.0, powers.take(steps))
    return total.astype(np.float32), discounts.astype(np.float32), last
