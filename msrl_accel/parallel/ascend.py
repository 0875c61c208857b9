"""What HCCL, the collectives of Ascend devices, is told: timeouts and rank tables.

Written against the documentation of CANN and MindSpore; not yet run on a device.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl_accel.errors import ConfigError
from msrl_accel.files import write_text_atomic


def communication_variables(timeout: float) -> dict[str, str]:
    """Environment variables of a process that takes part in collectives.

    Args:
        timeout: seconds for the links to be made, and for each collective. Raise it where networks
            are congested, and for closing evaluations that take longer: the others wait meanwhile.
    """
    if not 1 <= timeout <= 7200:
        raise ConfigError(f"hccl_timeout = {timeout:g}: HCCL takes 1 to 7200 seconds")
    seconds = str(int(timeout))
    return {"HCCL_CONNECT_TIMEOUT": seconds, "HCCL_EXEC_TIMEOUT": seconds}


def rank_table(servers: Mapping[str, Sequence[tuple[int, str]]]) -> dict[str, Any]:
    """HCCL's rank table, version 1.0: which device of which host is which rank.

    Args:
        servers: of each host's address, its devices in order of rank: number, address of the
            device's network interface (as `hccn_tool -i NUMBER -ip -g` tells it).

    Raises:
        ConfigError: an address or number cannot be used, or a device is named twice.
    """
    rank = 0
    listed = []
    for server, devices in servers.items():
        _check_address(server)
        numbers = [number for number, _ in devices]
        if not devices or len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise ConfigError(
                f"rank table, server {server}: devices {numbers} are not one or more different "
                "numbers from 0"
            )
        entries = []
        for number, address in devices:
            _check_address(address)
            entries.append(
                {"device_id": str(number), "device_ip": address, "rank_id": str(rank)},
            )
            rank += 1
        listed.append({"server_id": server, "device": entries, "host_nic_ip": "reserve"})
    return {
        "version": "1.0",
        "server_count": str(len(listed)),
        "server_list": listed,
        "status": "completed",
    }


def write_rank_table(path: str | Path, servers: Mapping[str, Sequence[tuple[int, str]]]) -> None:
    """Write `rank_table(servers)` to a file, for `--rank-table`."""
    write_text_atomic(Path(path), json.dumps(rank_table(servers), indent=2) + "\n")


def _check_address(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError as error:
        raise ConfigError(f"rank table: {text!r} is no IP address") from error
