"""Advantages of completions, on the host: GRPO, Dr.GRPO, RLOO, REINFORCE++; token weights.

Completions are rows: rewards [N], the prompt each answers `groups` [N], per-token arrays [N, L]
with `mask` True on the tokens the model chose (not on padding, nor on what a tool inserted).
"""

from __future__ import annotations

import numpy as np

from msrl_accel.errors import ConfigError

EPSILON = 1e-6  # added to the standard deviation of a group


def check_rewards(rewards: np.ndarray) -> np.ndarray:
    """Rewards [N] as float64; a `ConfigError` names the first that is not finite."""
    rewards = np.asarray(rewards, np.float64)
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        raise ConfigError(
            f"reward of completion {bad[0]} is {rewards[bad[0]]}: leave its group out, "
            "or make the reward function return a finite number"
        )
    return rewards


def _groups(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Index of each completion's group [N], and of each group its size [G] and mean reward [G].

    Where all rewards of a group are equal, the mean is that reward to the last bit.
    """
    rewards = check_rewards(rewards)
    _, index = np.unique(groups, return_inverse=True)
    index = index.reshape(-1)
    if index.size != rewards.size:
        raise ConfigError(f"{rewards.size} rewards but {index.size} group numbers: give one each")
    size = np.bincount(index)
    mean = np.bincount(index, rewards) / size
    low, high = np.full(size.size, np.inf), np.full(size.size, -np.inf)
    np.minimum.at(low, index, rewards)
    np.maximum.at(high, index, rewards)
    return index, size, np.where(low == high, low, mean)


def _centered(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """R - mean of the group [N], index [N] and size [G]; a group of one is an error."""
    index, size, mean = _groups(rewards, groups)
    alone = np.flatnonzero(size[index] < 2)
    if alone.size:
        raise ConfigError(
            f"completion {alone[0]} is alone in its group: an advantage relative to the group "
            "needs a group_size of at least 2, and completions in whole groups"
        )
    return np.asarray(rewards, np.float64) - mean[index], index, size


def grpo_advantages(
    rewards: np.ndarray, groups: np.ndarray, population_std: bool = False
) -> np.ndarray:
    """A = (R - mean) / (std + 1e-6) within the group [N] (Shao et al. 2024, arXiv:2402.03300).

    The sample standard deviation, or with `population_std` that over n. Equal rewards give 0.
    """
    centered, index, size = _centered(rewards, groups)
    variance = np.bincount(index, centered**2) / (size - (0 if population_std else 1))
    advantages: np.ndarray = centered / (np.sqrt(variance) + EPSILON)[index]
    return advantages


def dr_grpo_advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A = R - mean of the group [N] (Liu et al. 2025, arXiv:2503.20783)."""
    return _centered(rewards, groups)[0]


def rloo_advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A = R - mean of the others in the group = n / (n - 1) (R - mean) [N].

    Ahmadian et al. 2024, arXiv:2402.14740.
    """
    centered, index, size = _centered(rewards, groups)
    advantages: np.ndarray = centered * (size / (size - 1))[index]
    return advantages


def returns_to_go(rewards: np.ndarray, mask: np.ndarray, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_(t+1) over the chosen tokens of each row [N, L]; 0 on the others.

    A token that was not chosen is no step: it neither discounts nor ends the return.
    """
    returns = np.zeros(rewards.shape, np.float64)
    following = np.zeros(rewards.shape[0], np.float64)
    for t in reversed(range(rewards.shape[1])):
        following = np.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = np.where(mask[:, t], following, 0.0)
    return returns


def whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(x - mean) / (std + 1e-8) over the masked entries; 0 elsewhere, and where all are equal."""
    chosen = values[mask]
    if not chosen.size or np.all(chosen == chosen[0]):
        return np.zeros(values.shape, np.float64)
    scaled = (values - chosen.mean()) / (chosen.std() + 1e-8)
    return np.where(mask, scaled, 0.0)


def reinforce_advantages(
    rewards: np.ndarray, mask: np.ndarray, gamma: float = 1.0, penalty: np.ndarray | None = None
) -> np.ndarray:
    """REINFORCE++: returns-to-go, whitened over the batch [N, L] (Hu 2025, arXiv:2501.03262).

    Args:
        rewards: of each completion, received at its last chosen token [N].
        mask: chosen tokens [N, L].
        gamma: discount of one token.
        penalty: subtracted from each token's reward [N, L], such as beta (log pi - log pi_ref).
    """
    rewards = check_rewards(rewards)
    length = mask.shape[1]
    last = length - 1 - np.argmax(mask[:, ::-1], axis=1)
    token_rewards = np.zeros(mask.shape, np.float64)
    token_rewards[np.arange(len(rewards)), last] = rewards
    if penalty is not None:
        token_rewards -= np.where(mask, penalty, 0.0)
    return whiten(returns_to_go(token_rewards, mask, gamma), mask)


def informative(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Which completions are in groups whose rewards differ [N]; the others have no gradient.

    DAPO drops or resamples the others (Yu et al. 2025, arXiv:2503.14476, eq. 11).
    """
    index, _, mean = _groups(rewards, groups)
    differs = np.bincount(index, rewards != mean[index]) > 0
    kept: np.ndarray = differs[index]
    return kept


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int) -> np.ndarray:
    """DAPO's soft penalty of long completions [N] (arXiv:2503.14476, eq. 13), to add to rewards.

    0 up to max_length - buffer tokens, from there linear to -1 at max_length.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            f"overlong buffer = {buffer}: must be at least 1 and at most max_length = {max_length}"
        )
    beyond = np.asarray(lengths, np.float64) - (max_length - buffer)
    penalty: np.ndarray = -np.clip(beyond / buffer, 0.0, 1.0)
    return penalty + 0.0  # no negative zeros


def token_weights(
    aggregation: str,
    mask: np.ndarray,
    max_length: int,
    n_tokens: int | None = None,
    n_sequences: int | None = None,
) -> np.ndarray:
    """What each token's loss is multiplied by before everything is summed [N, L].

    The whole batch of one optimiser step is normalised here, once, so that its loss does not depend
    on how it is divided into micro-batches or among processes.

    Args:
        aggregation: 'token_mean': 1 / tokens of the batch. 'sequence_mean': the mean over
            completions of their token means. 'constant_length': 1 / (completions * max_length).
        mask: chosen tokens [N, L].
        max_length: the longest completion allowed.
        n_tokens, n_sequences: chosen tokens and completions of the whole batch, where `mask` is one
            process's share of it. Completions without chosen tokens do not count.
    """
    lengths = mask.sum(axis=1)
    n_tokens = int(lengths.sum()) if n_tokens is None else n_tokens
    n_sequences = int((lengths > 0).sum()) if n_sequences is None else n_sequences
    if aggregation == "token_mean":
        scale = np.full(len(mask), 1.0 / max(n_tokens, 1))
    elif aggregation == "sequence_mean":
        scale = 1.0 / (np.maximum(lengths, 1) * max(n_sequences, 1))
    elif aggregation == "constant_length":
        scale = np.full(len(mask), 1.0 / (max(n_sequences, 1) * max_length))
    else:
        raise ConfigError(
            f"aggregation = {aggregation!r}: use token_mean, sequence_mean or constant_length"
        )
    return np.where(mask, scale[:, None], 0.0)


def correction_weights(
    log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray, cap: float
) -> np.ndarray:
    """min(pi_old / mu, cap) of each chosen token, 1 on the others [N, L].

    pi_old is the trainer's policy before the update, mu the one that sampled. Truncated importance
    sampling (Yao et al. 2025) corrects for a rollout engine that computes differently, the
    decoupled objective (Hilton et al. 2022, arXiv:2110.00641) for weights that have moved on.
    """
    log_ratio = np.where(mask, np.asarray(log_probs, np.float64), 0.0)
    log_ratio = log_ratio - np.where(mask, np.asarray(rollout_log_probs, np.float64), 0.0)
    return np.exp(np.minimum(log_ratio, np.log(cap)))
