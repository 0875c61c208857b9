"""What the error codes of ATC mean for an exported policy, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CODE = re.compile(r"\b(?:E\d{5}|E[A-Z]\d{4})\b")

_SHAPES = (
    "the input shapes do not match the model: build from the policy.onnx of the same bundle and "
    "leave --input_shape as it was written"
)
_PROFILES = "give 2 to 100 different batch sizes of at least 1, or one fixed batch size"
_UNSUPPORTED = (
    "an operator is not known to this CANN: `python -m msrl_accel.export.om check BUNDLE` names "
    "those outside the documented list; install a newer CANN with the operator package (kernels or "
    "ops) of this chip"
)
_COMPILE = (
    "an operator could not be compiled: see the log in ~/ascend/log, check that the operator "
    "package (kernels or ops) of this chip is installed, and that --soc_version is the name of "
    "`npu-smi info` after 'Ascend'; if it is a float32 operator of precision origin, try "
    "cube_fp16in_fp32out and compare with msrl-check --precision"
)
_FILES = "check that the folder exists, is writable, and that its disk has space"

# Codes of CANN's graph engine and of TEFusion, as their documentation lists them.
REMEDIES: Mapping[str, str] = {
    "E10001": "an option has a value that this CANN does not take: `atc --help` lists its options",
    "E10002": _SHAPES,
    "E10003": "an option has a value that this CANN does not take: `atc --help` lists its options",
    "E10004": "an option is empty: check the quotation marks of the command",
    "E10007": "an option is missing: run the command as it was written",
    "E10009": "dynamic batch sizes cannot be combined with other dynamic options: give one only",
    "E10010": "--log takes debug, info, warning, error or null",
    "E10011": f"a dimension is -1 without batch sizes: {_PROFILES}",
    "E10012": _SHAPES,
    "E10013": "an option is out of its range: `atc --help` lists the ranges",
    "E10014": "an option has a value that this CANN does not take: `atc --help` lists its options",
    "E10015": "an option has a value that this CANN does not take: `atc --help` lists its options",
    "E10016": f"an input name is not in the model: {_SHAPES}",
    "E10018": f"only the batch may be -1: {_SHAPES}",
    "E10021": "a path is too long: build in a folder with a shorter path",
    "E10022": "--output has no file name: give a path that ends in a name",
    "E10031": f"no input has batch -1: {_SHAPES}",
    "E10035": _PROFILES,
    "E10036": _PROFILES,
    "E10038": _PROFILES,
    "E10039": _PROFILES,
    "E10040": f"no input has batch -1: {_SHAPES}",
    "E10041": "the model cannot be read: copy policy.onnx again and compare its SHA-256",
    "E10049": _SHAPES,
    "E10054": "an option is empty: quote values that hold a semicolon",
    "E10055": "this CANN does not support an option of the command: upgrade CANN, or drop it",
    "E10501": f"{_UNSUPPORTED}; check that set_env.sh of CANN was sourced (ASCEND_OPP_PATH)",
    "E13001": f"a file cannot be opened: {_FILES}",
    "E13003": f"a file cannot be read: {_FILES}",
    "E13004": f"a file cannot be written: {_FILES}",
    "E13005": "the model cannot be read: copy policy.onnx again and compare its SHA-256",
    "E13010": _UNSUPPORTED,
    "E13024": "an environment variable is wrong: source set_env.sh of CANN in a new shell",
    "E14001": "an operator does not take its inputs, for example their type: " + _UNSUPPORTED,
    "E16001": "the model has no input: export the bundle again",
    "E16002": _UNSUPPORTED,
    "E16004": "the model is empty: copy policy.onnx again and compare its SHA-256",
    "E16005": "the model mixes operator sets: export the bundle again",
    "E19999": "an inner error of CANN: see the log in ~/ascend/log",
    "E40001": "CANN's Python packages cannot be imported: source set_env.sh of CANN and install "
    "the Python packages that its installation guide lists",
    "E40020": "CANN's Python packages cannot be imported: source set_env.sh of CANN and install "
    "the Python packages that its installation guide lists",
    "E40021": _COMPILE,
    "E40022": _COMPILE,
    "E40023": f"a path is wrong: {_FILES}",
}
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("E1", "`atc --help` lists the options, the log in ~/ascend/log has more"),
    ("E4", _COMPILE),
    ("E", "look the code up in the troubleshooting guide of CANN; the log is in ~/ascend/log"),
)


def explain(output: str) -> list[tuple[str, str, str]]:
    """Error codes in the output of ATC, in order of appearance.

    Returns:
        (code, the line it is in, what to do), one for each different code.
    """
    found: dict[str, str] = {}
    for line in output.splitlines():
        for code in _CODE.findall(line):
            found.setdefault(code, line.strip())
    return [(code, line, remedy(code)) for code, line in found.items()]


def remedy(code: str) -> str:
    """What to do about an error code, as exactly as it is known."""
    if code in REMEDIES:
        return REMEDIES[code]
    return next(text for prefix, text in _FAMILIES if code.startswith(prefix))
