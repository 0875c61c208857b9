"""What every compiled update shares: the flat optimiser with its gradient watch, and schedules."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.networks import Weights
from msrl_accel.parallel.world import world

if TYPE_CHECKING:
    from msrl_accel.policy import Policy

logger = logging.getLogger("msrl_accel")

BETA1, BETA2 = 0.9, 0.999


class FlatAdam(nn.Cell):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) on all weights as one vector, with a clipped norm.

    One vector means one norm, one clip and one Adam kernel whatever the number of tensors. The
    vector is the weights' working copy within an update: `gather` fills it, `scatter` writes it
    back.

    construct(gradients, step_size, epsilon) -> norm of the gradient before clipping. A gradient
    that is not finite counts as zero. Where several processes train together, the gradient is the
    mean of theirs.

    Args:
        weights: the trained Parameters.
        max_grad_norm: gradients of a larger norm are scaled down to it.
    """

    def __init__(self, weights: ParameterTuple, max_grad_norm: float) -> None:
        super().__init__(auto_prefix=False)
        self.weights = weights
        self.shapes = tuple(tuple(w.shape) for w in weights)
        self.sizes = tuple(w.size for w in weights)
        total = sum(self.sizes)
        self.flat = Parameter(Tensor(np.zeros(total, np.float32)), name="adam.flat")
        self.moment1 = Parameter(Tensor(np.zeros(total, np.float32)), name="adam.moment1")
        self.moment2 = Parameter(Tensor(np.zeros(total, np.float32)), name="adam.moment2")
        self.max_grad_norm = max_grad_norm
        self.adam = ops.Adam()
        self.zero = Tensor(0.0, mstype.float32)
        self.beta1 = Tensor(BETA1, mstype.float32)
        self.beta2 = Tensor(BETA2, mstype.float32)
        self.concat = ops.Concat()
        self.is_finite = ops.IsFinite()
        self.half_square_sum = ops.L2Loss()
        self.mean = _process_mean()

    def flatten(self, tensors: Weights) -> Tensor:
        pieces = []
        for tensor in tensors:
            pieces.append(tensor.reshape((-1,)))
        return self.concat(tuple(pieces))

    def synchronize(self, vector: Tensor) -> Tensor:
        """The mean over the processes that train together; of one, the vector itself."""
        return vector if self.mean is None else self.mean(vector)

    def gather(self) -> Tensor:
        """Copy the weights into the flat vector."""
        return ops.assign(self.flat, self.flatten(self.weights))

    def split(self) -> Weights:
        """The flat vector as tensors of the weights' shapes."""
        return self.split_of(self.flat)

    def split_of(self, flat: Tensor) -> Weights:
        """Another vector of that layout, such as a target network's, as such tensors."""
        tensors: Weights = ()
        offset = 0
        for shape, size in zip(self.shapes, self.sizes):
            tensors = (*tensors, ops.slice(flat, (offset,), (size,)).reshape(shape))
            offset += size
        return tensors

    def scatter(self) -> None:
        """Copy the flat vector back into the weights."""
        tensors = self.split()
        for i in range(len(self.sizes)):
            ops.assign(self.weights[i], tensors[i])

    def construct(self, gradients: Weights, step_size: Tensor, epsilon: Tensor) -> Tensor:
        gradient = self.synchronize(self.flatten(gradients))
        norm = ops.sqrt(2.0 * self.half_square_sum(gradient))
        scale = self.max_grad_norm / ops.maximum(norm, self.max_grad_norm)
        # Select, since a product with zero would keep NaN.
        gradient = ops.select(self.is_finite(norm), gradient * scale, ops.zeros_like(gradient))
        # The bias correction is in step_size and epsilon, so the kernel's own (1 - beta^t) is 1.
        updated = self.adam(
            self.flat,
            self.moment1,
            self.moment2,
            self.zero,
            self.zero,
            step_size,
            self.beta1,
            self.beta2,
            epsilon,
            gradient,
        )
        return ops.depend(norm, updated)


def _process_mean() -> nn.Cell | None:
    """What averages over the processes of this run; None for a single one."""
    if world().size == 1:
        return None
    from msrl_accel.parallel.collectives import GradientMean

    return GradientMean(world().size)


class EvaluateActions(nn.Cell):
    """construct(*observations, raw_action) -> log_prob [B], value [B], as the loss has them."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(auto_prefix=False)
        self.policy = policy

    def construct(self, *inputs: Tensor) -> Weights:
        log_prob, _, value = self.policy.evaluate(self.policy.weights, inputs[:-1], inputs[-1])
        return log_prob, value


def adam_step_sizes(
    learning_rate: float, epsilon: float, steps_done: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bias-corrected step size and epsilon [n] float32 of the steps after `steps_done`.

    m_hat / (sqrt(v_hat) + eps) = m * c / (sqrt(v) + eps * sqrt(1 - beta2^t)) with
    c = sqrt(1 - beta2^t) / (1 - beta1^t).
    """
    t = np.arange(steps_done + 1, steps_done + n + 1, dtype=np.float64)
    root = np.sqrt(1.0 - BETA2**t)
    return (
        (learning_rate * root / (1.0 - BETA1**t)).astype(np.float32),
        (epsilon * root).astype(np.float32),
    )


def schedule(kind: str, value: float, progress: float) -> float:
    """'constant', or 'linear' from `value` at progress 0 to 0 at progress 1."""
    return value if kind == "constant" else value * max(0.0, 1.0 - progress)


class GradientWatch:
    """Counts clipped, exploding and non-finite gradients, and warns of the latter two.

    Args:
        max_grad_norm: the clipping norm.
        alarm: norms above this many times `max_grad_norm` count as exploding.
    """

    def __init__(self, max_grad_norm: float, alarm: float) -> None:
        self.max_grad_norm = max_grad_norm
        self.alarm = alarm
        self.exploding = 0
        self.non_finite = 0

    def update(self, norms: np.ndarray) -> dict[str, float]:
        """Gradient norms of one update's minibatches -> metrics."""
        finite = norms[np.isfinite(norms)]
        non_finite = norms.size - finite.size
        exploding = int(np.sum(finite > self.alarm * self.max_grad_norm))
        self.non_finite += non_finite
        self.exploding += exploding
        if non_finite:
            logger.warning(
                "%d of %d gradients were not finite and were not applied (%d so far); "
                "check rewards and observations, or lower the learning rate",
                non_finite,
                norms.size,
                self.non_finite,
            )
        elif exploding:
            logger.warning(
                "%d of %d gradients were over %g times max_grad_norm and were clipped (%d so far)",
                exploding,
                norms.size,
                self.alarm,
                self.exploding,
            )
        return {
            "grad_norm": float(finite.mean()) if finite.size else math.nan,
            "grad_norm_max": float(finite.max()) if finite.size else math.nan,
            "grad_clipped": float(np.mean(norms > self.max_grad_norm)),
            "grad_exploding": float(self.exploding),
            "grad_non_finite": float(self.non_finite),
        }

    def state(self) -> dict[str, Any]:
        return {"exploding": self.exploding, "non_finite": self.non_finite}

    def restore(self, state: dict[str, Any]) -> None:
        self.exploding, self.non_finite = int(state["exploding"]), int(state["non_finite"])
