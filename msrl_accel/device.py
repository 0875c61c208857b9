"""Process-wide set-up of MindSpore."""

from __future__ import annotations

from typing import Protocol

import mindspore as ms

from msrl_accel.errors import ConfigError


class DeviceOptions(Protocol):
    """The fields of the `runtime` configuration section used here."""

    device: str
    threads: int


def set_up(options: DeviceOptions) -> None:
    """Graph mode on the chosen device; repeated calls are harmless.

    Raises:
        ConfigError: the device is not there.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        if ms.get_context("device_target") != options.device:
            ms.set_device(options.device)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"runtime.device = {options.device!r}: MindSpore cannot use it here "
            f"({str(error).splitlines()[0]}); use CPU, or check driver and firmware with npu-smi"
        ) from error
    if ms.get_context("runtime_num_threads") != options.threads:
        ms.set_context(runtime_num_threads=options.threads)
