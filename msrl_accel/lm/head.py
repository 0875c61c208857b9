"""Log-probability and entropy of given tokens, without keeping logits of the whole vocabulary."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from msrl_accel.lm.layers import MASKED

CHUNK_LOGITS = 2**24
"""Logits held at a time (64 MB in float32)."""


class LogProbHead(nn.Cell):
    """Distribution over the vocabulary at [M] hidden states, told only at the target tokens.

    Logits are computed for a chunk of rows at a time, and again in the backward pass, so memory
    does not grow with M times the vocabulary.

    construct(hidden [M, H], projection [V, H], targets [M] int32, temperature scalar, kept [M, K]
    int32) -> log-probability [M] of the targets, entropy [M], both of softmax(logits /
    temperature). Where `restricted`, the softmax is over the tokens `kept` lists (a token may be
    listed twice); a target outside of them has log-probability -1e30, not infinite.
    """

    def __init__(self, vocab_size: int, restricted: bool) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.restricted = restricted
        self.chunk = max(1, CHUNK_LOGITS // vocab_size)
        self.linear = ops.MatMul(transpose_b=True)
        self.matmul = ops.MatMul()
        self.matmul_ta = ops.MatMul(transpose_a=True)
        self.tile = ops.Tile()
        self.log_softmax = ops.LogSoftmax(-1)

    def log_probs(
        self, hidden: Tensor, projection: Tensor, temperature: Tensor, kept: Tensor
    ) -> Tensor:
        """[m, V]"""
        logits = self.linear(hidden, projection) * (1.0 / temperature)
        if self.restricted:
            listed = ops.tensor_scatter_elements(
                ops.zeros_like(logits), kept, ops.ones(kept.shape, logits.dtype), 1
            )
            logits = ops.select(listed > 0.5, logits, ops.full_like(logits, MASKED))
        return self.log_softmax(logits)

    def rows(self, x: Tensor, start: int) -> Tensor:
        return x[start : start + self.chunk]

    def columns(self, x: Tensor) -> Tensor:
        """x [m, 1] -> [m, V]"""
        return self.tile(x, (1, self.vocab_size))

    def construct(
        self,
        hidden: Tensor,
        projection: Tensor,
        targets: Tensor,
        temperature: Tensor,
        kept: Tensor,
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies = [], []
        for start in range(0, hidden.shape[0], self.chunk):
            every = self.log_probs(
                self.rows(hidden, start), projection, temperature, self.rows(kept, start)
            )
            target = self.rows(targets, start).reshape((-1, 1))
            log_probs.append(ops.gather_elements(every, 1, target).reshape((-1,)))
            entropies.append(-(ops.exp(every) * every).sum(-1))
        if len(log_probs) == 1:
            return log_probs[0], entropies[0]
        return ops.concat(log_probs), ops.concat(entropies)

    def bprop(self, hidden, projection, targets, temperature, kept, out, dout):  # type: ignore[no-untyped-def]
        """d log p_t / d z = 1_t - p;  d entropy / d z = -p (log p + entropy);  z = logits."""
        hidden_grads, projection_grad = [], None
        for start in range(0, hidden.shape[0], self.chunk):
            chunk = self.rows(hidden, start)
            every = self.log_probs(chunk, projection, temperature, self.rows(kept, start))
            target = self.rows(targets, start).reshape((-1, 1))
            dlog_prob = self.rows(dout[0], start).reshape((-1, 1))
            dentropy = self.rows(dout[1], start).reshape((-1, 1))
            entropy = self.rows(out[1], start).reshape((-1, 1))
            # Written out: a broadcast keeps 16 bytes for each of its numbers in the compiled graph.
            offset, slope = self.columns(dlog_prob + dentropy * entropy), self.columns(dentropy)
            dz = -ops.exp(every) * (offset + slope * every)
            dz = ops.tensor_scatter_elements(dz, target, dlog_prob, 1, "add")
            dz = dz * (1.0 / temperature)
            hidden_grads.append(self.matmul(dz, projection))
            product = self.matmul_ta(dz, chunk)
            projection_grad = product if projection_grad is None else projection_grad + product
        hidden_grad = hidden_grads[0] if len(hidden_grads) == 1 else ops.concat(hidden_grads)
        return (
            hidden_grad,
            projection_grad,
            ops.zeros_like(targets),
            ops.zeros_like(temperature),
            ops.zeros_like(kept),
        )


def no_kept(rows: int) -> Tensor:
    """What stands for the kept set where the softmax is over the whole vocabulary."""
    return ops.zeros((rows, 1), mstype.int32)
