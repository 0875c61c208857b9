"""Losses of the GRPO family, composed from one table, `LossSettings`; `PRESETS` has the known ones.

    advantage x ratio level x clip x aggregation x correction x KL estimator

Advantage, aggregation and correction act on the host (`advantages.py`) and reach the graph as two
numbers of each token, `advantage` and `weight`. The rest is the functions of tensors below: one
value a token, all of shape [K].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops

from msrl_accel.config_schema import Field, Section
from msrl_accel.errors import ConfigError
from msrl_accel.lm import advantages as adv

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut off at this size, so that no exp overflows."""


class LossSettings(Section):
    """One row of the table. Defaults: GRPO, Shao et al. 2024."""

    advantage: str = Field("grpo", choices=("grpo", "dr_grpo", "rloo", "reinforce++"))
    """Of a completion in its group: grpo (R - mean) / std, dr_grpo R - mean, rloo R - mean of the
    others; reinforce++: of a token, the return-to-go whitened over the batch."""
    population_std: bool = Field(False)
    """For grpo: standard deviation over n instead of n - 1."""
    gamma: float = Field(1.0, gt=0, le=1)
    """For reinforce++: discount of one token."""
    filter_groups: bool = Field(False)
    """Leave out groups whose rewards are all equal, and sample others (DAPO)."""
    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Share of the maximum length over which a penalty grows from 0 to -1 (DAPO); 0: none."""
    ratio: str = Field("token", choices=("token", "sequence"))
    """Level of the ratio pi / pi_old: of each token, or geometric mean over the completion."""
    clip: str = Field("ppo", choices=("none", "ppo", "dual", "cispo"))
    """none: -rA; ppo: -min(rA, clip(r)A); dual: as ppo, at most dual_clip |A| where A < 0; cispo:
    -sg(min(r, cispo_cap)) A log pi."""
    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float = Field(3.0, gt=1)
    """Bound of the dual clip."""
    cispo_cap: float = Field(5.0, gt=0)
    """Largest weight of cispo."""
    aggregation: str = Field(
        "sequence_mean", choices=("token_mean", "sequence_mean", "constant_length")
    )
    """token_mean: over all tokens of the batch; sequence_mean: over completions, of their means;
    constant_length: sum over tokens / (completions * maximum length)."""
    correction: str = Field("none", choices=("none", "tis", "decoupled"))
    """none: pi_old is the policy that sampled, mu. tis, decoupled: pi_old is the trainer's before
    the update, and weights min(pi_old / mu, correction_cap) correct for mu."""
    correction_cap: float | None = Field(None, gt=0)
    """Largest weight of the correction; null: 2 for tis, 5 for decoupled."""
    kl: str = Field("k3", choices=("k1", "k2", "k3"))
    """Estimate of the KL divergence to the reference from d = log pi - log pi_ref: k1: d; k2:
    d^2 / 2; k3: exp(-d) - 1 + d. In a loss only k2 has the gradient of the divergence; that of k3
    is biased, and that of k1 is zero in expectation."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term; 0: no reference model."""
    kl_in_reward: bool = Field(False)
    """For reinforce++: subtract kl_coef * k1 from each token's reward instead of adding a loss."""

    @property
    def cap(self) -> float:
        """Largest weight of the correction."""
        if self.correction_cap is not None:
            return self.correction_cap
        return 2.0 if self.correction == "tis" else 5.0

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and not self.kl_in_reward


_GROUP = LossSettings()
PRESETS: dict[str, LossSettings] = {
    # Shao et al. 2024, arXiv:2402.03300
    "grpo": _GROUP,
    # Liu et al. 2025, arXiv:2503.20783
    "dr_grpo": _GROUP.replace(advantage="dr_grpo", aggregation="constant_length"),
    # Yu et al. 2025, arXiv:2503.14476
    "dapo": _GROUP.replace(
        clip_high=0.28, aggregation="token_mean", filter_groups=True, overlong_buffer=0.2
    ),
    # Zheng et al. 2025, arXiv:2507.18071
    "gspo": _GROUP.replace(ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    # Ahmadian et al. 2024, arXiv:2402.14740: unbiased, so no length in the normalisation
    "rloo": _GROUP.replace(advantage="rloo", aggregation="constant_length"),
    # Hu 2025, arXiv:2501.03262
    "reinforce++": _GROUP.replace(
        advantage="reinforce++", aggregation="token_mean", kl="k1", kl_in_reward=True
    ),
    # MiniMax 2025, arXiv:2506.13585
    "cispo": _GROUP.replace(clip="cispo", aggregation="token_mean"),
}


def loss_settings(preset: str, **overrides: Any) -> LossSettings:
    """A preset with some fields changed; None leaves the preset's value.

    Raises:
        ConfigError: an unknown preset or field, or a value that does not fit.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset = {preset!r}: use one of {', '.join(PRESETS)}")
    changes = {name: value for name, value in overrides.items() if value is not None}
    settings = PRESETS[preset].replace(**changes)
    if settings.kl_in_reward and settings.advantage != "reinforce++":
        raise ConfigError(
            f"kl_in_reward with advantage = {settings.advantage!r}: rewards of single tokens need "
            "advantage = 'reinforce++'; set kl_in_reward to false"
        )
    return settings


class Weighted(NamedTuple):
    """What the graph needs of each token, [N, L]."""

    advantage: np.ndarray
    """Times the correction's weight: every loss here is proportional to the size of A."""
    weight: np.ndarray
    """Normalised over the whole batch (`token_weights`); 0 where a token has no loss."""


def weigh_tokens(
    settings: LossSettings,
    rewards: np.ndarray,
    groups: np.ndarray,
    mask: np.ndarray,
    max_length: int,
    log_probs: np.ndarray | None = None,
    rollout_log_probs: np.ndarray | None = None,
    reference_log_probs: np.ndarray | None = None,
    advantages: np.ndarray | None = None,
) -> Weighted:
    """Advantages and weights of every token, from the rewards of completions.

    The overlong penalty and the group filter act before, on rewards and on the choice of
    completions (`overlong_penalty`, `informative`).

    Args:
        rewards, groups: of each completion [N].
        mask: chosen tokens [N, L].
        max_length: the longest completion allowed.
        log_probs: of the trainer's policy before the update [N, L]; for a correction, and for the
            KL within the reward.
        rollout_log_probs: of the policy that sampled [N, L]; for a correction.
        reference_log_probs: of the reference model [N, L]; for the KL within the reward.
        advantages: of each completion [N], where they are known already.
    """
    if advantages is None:
        advantages = _advantages(settings, rewards, groups, mask, log_probs, reference_log_probs)
    if advantages.ndim == 1:
        advantages = np.where(mask, advantages[:, None], 0.0)
    if settings.correction != "none":
        if log_probs is None or rollout_log_probs is None:
            raise ConfigError(
                f"correction = {settings.correction!r} needs the log-probabilities of the "
                "trainer's policy and of the rollout"
            )
        advantages = advantages * adv.correction_weights(
            log_probs, rollout_log_probs, mask, settings.cap
        )
    weights = adv.token_weights(settings.aggregation, mask, max_length)
    return Weighted(advantages.astype(np.float32), weights.astype(np.float32))


def _advantages(
    settings: LossSettings,
    rewards: np.ndarray,
    groups: np.ndarray,
    mask: np.ndarray,
    log_probs: np.ndarray | None,
    reference_log_probs: np.ndarray | None,
) -> np.ndarray:
    if settings.advantage == "grpo":
        return adv.grpo_advantages(rewards, groups, settings.population_std)
    if settings.advantage == "dr_grpo":
        return adv.dr_grpo_advantages(rewards, groups)
    if settings.advantage == "rloo":
        return adv.rloo_advantages(rewards, groups)
    penalty = None
    if settings.kl_in_reward and settings.kl_coef > 0:
        if log_probs is None or reference_log_probs is None:
            raise ConfigError("kl_in_reward needs log-probabilities of policy and reference")
        penalty = settings.kl_coef * (log_probs - reference_log_probs)
    return adv.reinforce_advantages(rewards, mask, settings.gamma, penalty)


class TokenInputs(NamedTuple):
    """What the loss needs of the tokens of a micro-batch, [K] each."""

    old_log_prob: Tensor
    """Log-probability the ratio is taken to."""
    reference_log_prob: Tensor
    """Of the reference model; anything where there is no KL term."""
    advantage: Tensor
    weight: Tensor
    """0 where a token has no loss: its log-probabilities then have no effect, not even as NaN."""
    sequence: Tensor
    """int32: number of the completion within the micro-batch."""
    share: Tensor
    """1 / tokens with a loss in the completion; 0 where a token has no loss."""


def log_ratio(log_prob, other, mask):  # type: ignore[no-untyped-def]
    """log_prob - other where `mask`, else 0, within +- MAX_LOG_RATIO.

    Selected before any exp: a masked -inf or 200 must not become NaN, nor 0 * inf in a gradient.
    """
    zero = ops.zeros_like(log_prob)
    difference = ops.select(mask, log_prob, zero) - ops.select(mask, other, zero)
    return ops.minimum(ops.maximum(difference, -MAX_LOG_RATIO), MAX_LOG_RATIO)


def sequence_mean(values, sequence, share):  # type: ignore[no-untyped-def]
    """Mean over each completion's tokens, given to each of them."""
    n = values.shape[0]  # there are never more completions than tokens
    sums = ops.unsorted_segment_sum(values * share, sequence, n)
    return ops.gather(sums, sequence, 0)


def ppo_clip(ratio, advantage, low, high):  # type: ignore[no-untyped-def]
    """-min(r A, clip(r, 1 - low, 1 + high) A)."""
    clipped = ops.minimum(ops.maximum(ratio, 1.0 - low), 1.0 + high)
    return -ops.minimum(ratio * advantage, clipped * advantage)


def dual_clip(ratio, advantage, low, high, bound):  # type: ignore[no-untyped-def]
    """PPO's clip, and where A < 0 at most bound |A| (Ye et al. 2020, arXiv:1912.09729)."""
    loss = ppo_clip(ratio, advantage, low, high)
    return ops.select(advantage < 0, ops.minimum(loss, -bound * advantage), loss)


def cispo(ratio, advantage, log_prob, cap):  # type: ignore[no-untyped-def]
    """-sg(min(r, cap)) A log pi."""
    return -ops.stop_gradient(ops.minimum(ratio, cap)) * advantage * log_prob


def kl_estimate(kind, d):  # type: ignore[no-untyped-def]
    """k1, k2 or k3 of d = log pi - log pi_ref (Schulman 2020, "Approximating KL divergence")."""
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    return ops.exp(-d) - 1.0 + d


class PolicyLoss(nn.Cell):
    """Scalar: the sum over tokens of weight * (clipped surrogate + kl_coef * KL estimate).

    construct(log_prob [K], *TokenInputs)
    """

    def __init__(self, settings: LossSettings) -> None:
        super().__init__()
        self.ratio, self.clip, self.kl = settings.ratio, settings.clip, settings.kl
        self.clip_low, self.clip_high = settings.clip_low, settings.clip_high
        self.dual_clip, self.cispo_cap = settings.dual_clip, settings.cispo_cap
        self.kl_coef = settings.kl_coef if settings.kl_in_loss else 0.0

    def surrogate(self, ratio, advantage, log_prob):  # type: ignore[no-untyped-def]
        if self.clip == "none":
            return -ratio * advantage
        if self.clip == "cispo":
            return cispo(ratio, advantage, log_prob, self.cispo_cap)
        if self.clip == "dual":
            return dual_clip(ratio, advantage, self.clip_low, self.clip_high, self.dual_clip)
        return ppo_clip(ratio, advantage, self.clip_low, self.clip_high)

    def construct(  # type: ignore[no-untyped-def]
        self, log_prob, old_log_prob, reference_log_prob, advantage, weight, sequence, share
    ):
        mask = weight > 0
        log_prob = ops.select(mask, log_prob, ops.zeros_like(log_prob))
        d = log_ratio(log_prob, old_log_prob, mask)
        if self.ratio == "sequence":
            d = sequence_mean(d, sequence, share)
        loss = self.surrogate(ops.exp(d), advantage, log_prob)
        if self.kl_coef > 0:
            to_reference = log_ratio(log_prob, reference_log_prob, mask)
            loss = loss + self.kl_coef * kl_estimate(self.kl, to_reference)
        return (loss * weight).sum()


class SupervisedLoss(nn.Cell):
    """Scalar: the weighted sum of -log pi; the arguments of `PolicyLoss`, of which it needs two."""

    def construct(  # type: ignore[no-untyped-def]
        self, log_prob, old_log_prob, reference_log_prob, advantage, weight, sequence, share
    ):
        chosen = ops.select(weight > 0, log_prob, ops.zeros_like(log_prob))
        return -(chosen * weight).sum()
