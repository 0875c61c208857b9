"""Objects named `module:name` by the user."""

from __future__ import annotations

import importlib
from typing import Any

from msrl_accel.errors import EnvError


def import_object(name: str, what: str) -> Any:
    """The object `module:name`. EnvError, with `what` it was for, where it is not there.

    An exception raised while the module is imported is passed on as the cause.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise EnvError(f"{what} {name!r} must be written module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EnvError(
            f"{what} {name!r}: cannot import the module {module_name!r} ({error}); install it or "
            "add its folder to PYTHONPATH"
        ) from error
    except Exception as error:
        raise EnvError(f"{what} {name!r}: importing {module_name!r} failed: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise EnvError(f"{what} {name!r}: {module_name} has no {attribute}")
        found = getattr(found, part)
    return found
