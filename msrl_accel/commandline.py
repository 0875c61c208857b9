"""What the command lines share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from msrl_accel.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Reports mistakes as `ConfigError`, in one line, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(" ".join(message.split()))
