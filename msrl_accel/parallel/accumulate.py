"""Gradient steps on more rows than one minibatch, with one all-reduce for all of them."""

from __future__ import annotations

from mindspore import ops

from msrl_accel.algorithms.on_policy import MinibatchGraph
from msrl_accel.errors import ConfigError
from msrl_accel.networks import Weights


class AccumulatingGraph(MinibatchGraph):
    """A `MinibatchGraph` that computes the gradient of each minibatch in parts.

    The loss is a weighted sum over rows, so the sum of the parts' gradients is the gradient of the
    whole; the memory of activations is that of one part.

    Args:
        graph: the graph to do the work of, not yet compiled.
        parts: of a minibatch.

    Raises:
        ConfigError: the minibatch cannot be divided.
    """

    def __init__(self, graph: MinibatchGraph, parts: int) -> None:
        capacity, _, batch = graph.records.shape
        if batch % parts:
            raise ConfigError(
                f"a minibatch of {batch} rows cannot be accumulated from {parts} equal parts; "
                "choose a batch_size that they divide"
            )
        super().__init__(
            graph.policy,
            graph.loss,
            batch,
            capacity,
            graph.optimizer.max_grad_norm,
            graph.kl_limit,
        )
        self.parts = parts
        self.size = batch // parts

    def minibatch(self, observations, raw_actions, rows, scalars):  # type: ignore[no-untyped-def]
        whole: Weights = ()
        for row in self.split_scalars(scalars):
            whole = (*whole, row.reshape((self.batch,)))
        sums: Weights = ()
        records: Weights = ()
        for part in range(self.parts):
            begin, size = (part * self.size,), (self.size,)
            taken = ops.slice(rows, begin, size)
            inputs: Weights = ()
            for row in whole:
                inputs = (*inputs, ops.slice(row, begin, size))
            picked: Weights = ()
            for observation in observations:
                picked = (*picked, self.take(observation, taken, 0))
            raw_action = self.take(raw_actions, taken, 0)
            (_, record), gradients = self.grad(self.optimizer.split(), picked, raw_action, inputs)
            records = (*records, record)
            if part == 0:
                sums = gradients
            else:
                added: Weights = ()
                for i in range(len(sums)):
                    added = (*added, sums[i] + gradients[i])
                sums = added
        return sums, whole, ops.concat(records, 1)
