"""Opening a bundle on the engines that are here; MindSpore is imported for its own engines only."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Union

from msrl_accel.acting import ActingPolicy
from msrl_accel.errors import BundleError, PolicyError
from msrl_accel.export.bundle import Bundle
from msrl_accel.files import PathLike
from msrl_accel.runtime.base import PolicyRuntime

BACKENDS = ("graph", "mindir", "lite", "ms", "onnx", "om")
"""By name: the training Cell, MindSpore on MindIR, MindSpore Lite on MindIR, MindSpore Lite on its
own file, ONNX Runtime, Ascend."""
AUTO_ORDER = ("onnx", "lite", "om", "mindir")
"""What "auto" tries, fastest on a CPU first."""

AnyBundle = Union[Bundle, PathLike]
Availability = tuple[bool, str]


def load_policy(
    bundle: AnyBundle, backend: str = "auto", *, batch_invariant: bool = False, seed: int = 0
) -> ActingPolicy:
    """A policy that acts: ``load_policy(bundle).act(observation)``.

    Args:
        bundle: the folder that `msrl-export` wrote.
        backend: one of `BACKENDS`, or "auto" for the fastest that is here.
        batch_invariant: whether a row's result must not depend, to the last bit, on the batch.
        seed: of the noise of sampled actions.

    Raises:
        BundleError: the bundle is damaged, or has no file for the backend.
        PolicyError: the engine is missing (the message says what to install), or fails.
    """
    return ActingPolicy(open_runtime(bundle, backend, batch_invariant=batch_invariant), seed)


def open_runtime(
    bundle: AnyBundle, backend: str = "auto", *, batch_invariant: bool = False
) -> PolicyRuntime:
    """The engine under `load_policy`, with every output of the graph; same arguments and errors."""
    opened = _opened(bundle)
    if not opened.passed:
        warnings.warn(
            f"{opened.path} did not pass its parity check: it may not act as it was trained",
            stacklevel=2,
        )
    runtime = _OPENERS[_choose(opened, backend)](opened)
    if not batch_invariant:
        return runtime
    from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime

    return BatchInvariantRuntime(runtime)


def available_backends(bundle: AnyBundle | None = None) -> dict[str, Availability]:
    """For each backend: whether it can be used here, and its version or what is missing.

    Args:
        bundle: with it, a backend must also have its file there.
    """
    opened = (
        Bundle.open(bundle) if bundle is not None and not isinstance(bundle, Bundle) else bundle
    )
    return {name: _availability(name, opened) for name in BACKENDS}


def _opened(bundle: AnyBundle) -> Bundle:
    return bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)


def _choose(bundle: Bundle, backend: str) -> str:
    if backend == "auto":
        states = {name: _availability(name, bundle) for name in AUTO_ORDER}
        for name, (usable, _) in states.items():
            if usable:
                return name
        reasons = "; ".join(f"{name}: {reason}" for name, (_, reason) in states.items())
        raise PolicyError(f"no engine here can run {bundle.path} ({reasons})")
    if backend not in BACKENDS:
        raise PolicyError(f"backend = {backend!r}: use auto or one of {', '.join(BACKENDS)}")
    usable, reason = _availability(backend, bundle)
    if not usable:
        held = bundle.manifest["models"]
        kind = BundleError if backend not in held and backend != "graph" else PolicyError
        raise kind(f"backend {backend!r} cannot run {bundle.path}: {reason}")
    return backend


def _availability(backend: str, bundle: Bundle | None) -> Availability:
    if bundle is not None and backend != "graph" and bundle.file(backend) is None:
        note = bundle.manifest["notes"].get(backend, "it was not exported")
        return False, f"the bundle has no {backend} file ({note})"
    return _ENGINES[backend]()


def _mindspore() -> Availability:
    if importlib.util.find_spec("mindspore") is None:
        return False, "MindSpore is not installed: pip install mindspore"
    return True, "MindSpore"


def _onnx() -> Availability:
    from msrl_accel.runtime import onnx

    return onnx.available()


def _lite() -> Availability:
    from msrl_accel.runtime import lite_setup

    return lite_setup.available()


def _om() -> Availability:
    if importlib.util.find_spec("msrl_accel.runtime.om") is None:
        return False, "this version of msrl_accel cannot run OM files"
    from msrl_accel.runtime import om

    state: Availability = om.available()
    return state


def _open_graph(bundle: Bundle) -> PolicyRuntime:
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up
    from msrl_accel.export.mindir import policy_of
    from msrl_accel.runtime.graph import GraphRuntime

    set_up(RuntimeConfig())
    return GraphRuntime(policy_of(bundle), bundle.version)


def _open_mindir(bundle: Bundle) -> PolicyRuntime:
    from msrl_accel.runtime.mindir import MindirRuntime

    return MindirRuntime(_model(bundle, "mindir"), bundle.spec, bundle.version)


def _open_lite(bundle: Bundle, form: str = "lite") -> PolicyRuntime:
    from msrl_accel.runtime.lite import LiteRuntime

    return LiteRuntime(_model(bundle, form), bundle.spec, bundle.version)


def _open_ms(bundle: Bundle) -> PolicyRuntime:
    return _open_lite(bundle, "ms")


def _open_onnx(bundle: Bundle) -> PolicyRuntime:
    from msrl_accel.runtime.onnx import OnnxRuntime

    return OnnxRuntime(_model(bundle, "onnx"), bundle.spec, bundle.version)


def _open_om(bundle: Bundle) -> PolicyRuntime:
    from msrl_accel.runtime.om import OmRuntime

    runtime: PolicyRuntime = OmRuntime(_model(bundle, "om"), bundle.spec, bundle.version)
    return runtime


def _model(bundle: Bundle, backend: str) -> Path:
    file = bundle.file(backend)
    assert file is not None  # `_choose` has seen it
    return file


_ENGINES: Mapping[str, Callable[[], Availability]] = {
    "graph": _mindspore,
    "mindir": _mindspore,
    "lite": _lite,
    "ms": _lite,
    "onnx": _onnx,
    "om": _om,
}
_OPENERS: Mapping[str, Callable[[Bundle], PolicyRuntime]] = {
    "graph": _open_graph,
    "mindir": _open_mindir,
    "lite": _open_lite,
    "ms": _open_ms,
    "onnx": _open_onnx,
    "om": _open_om,
}
