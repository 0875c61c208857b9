"""Collectives over the processes that msrun started: HCCL on Ascend, MCCL on CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from msrl_accel.device import DeviceOptions, set_up
from msrl_accel.errors import ConfigError
from msrl_accel.networks import set_parameter
from msrl_accel.parallel.world import World, enter

BACKENDS = {"Ascend": "hccl", "CPU": "mccl"}
"""Of MindSpore's collective communication, by device. The part with HCCL follows its documentation
and has not yet run on a device."""


class GradientMean(nn.Cell):
    """Mean over the processes of a tensor, such as all gradients in one vector: one AllReduce."""

    def __init__(self, size: int) -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = ops.AllReduce()
        self.share = 1.0 / size

    def construct(self, vector: Tensor) -> Tensor:
        flat = self.all_reduce(vector.reshape((-1,)))  # it takes no scalars
        return flat.reshape(vector.shape) * self.share


class _Gather(nn.Cell):
    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.all_gather = ops.AllGather()

    def construct(self, x: Tensor) -> Tensor:
        return self.all_gather(x)


class _Broadcast(nn.Cell):
    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.broadcast = ops.Broadcast(0)

    def construct(self, x: Tensor) -> Tensor:
        return self.broadcast((x,))[0]


class MindSporeWorld(World):
    """The processes of this job; made by `join`.

    Every shape that is gathered is compiled once.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._gather = _Gather()
        self._broadcast = _Broadcast()

    def gather(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        # The backends gather float32: a number travels as the two that add up to it.
        high = x.astype(np.float32)
        with np.errstate(invalid="ignore"):
            low = np.where(np.isfinite(high), x - high, 0.0).astype(np.float32)
        sent = np.stack([high, low]).reshape(1, -1)
        received = self._gather(Tensor(sent)).asnumpy().astype(np.float64)
        parts = received.reshape((self.size, 2, *x.shape))
        together: np.ndarray = parts[:, 0] + parts[:, 1]
        return together

    def broadcast(self, parameters: Sequence[Parameter]) -> None:
        """Give every process rank 0's values of float32 Parameters, in one vector."""
        flat = np.concatenate([p.asnumpy().reshape(-1) for p in parameters])
        received = self._broadcast(Tensor(flat)).asnumpy()
        offset = 0
        for parameter in parameters:
            set_parameter(parameter, received[offset : offset + parameter.size])
            offset += parameter.size


def join(options: DeviceOptions) -> MindSporeWorld:
    """Meet the other processes of this msrun job, and make them this process's world.

    Raises:
        ConfigError: msrun has not started this process, or its device has no collectives.
    """
    if "MS_WORKER_NUM" not in os.environ:
        raise ConfigError(
            "data-parallel training runs under msrun: python -m msrl_accel.parallel.launch -n 2 -- "
            "--algo ppo --env CartPole-v1"
        )
    if options.device not in BACKENDS:
        raise ConfigError(
            f"runtime.device = {options.device!r}: data-parallel training knows "
            f"{' and '.join(BACKENDS)}"
        )
    set_up(options)
    init(BACKENDS[options.device])
    joined = MindSporeWorld(get_rank(), get_group_size())
    enter(joined)
    return joined
