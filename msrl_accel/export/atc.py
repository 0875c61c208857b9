"""Command lines of ATC and of MindSpore Lite's converter, and the options that make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msrl_accel.errors import ConfigError, ExportError
from msrl_accel.export.names import input_names
from msrl_accel.spaces import PolicySpec

SOC_VARIABLE = "${SOC_VERSION}"
"""Stands in a command for the chip of the host that runs it."""
PRECISIONS = ("origin", "cube_fp16in_fp32out", "mixed_float16", "mixed_bfloat16", "fp16")
"""Values of --precision_mode_v2, from exact to fast. ATC's own default is fp16."""
LOG_LEVELS = ("debug", "info", "warning", "error", "null")
MAX_PROFILES, MAX_BATCH = 100, 2048

LITE_PRECISIONS = {
    "origin": "enforce_origin",
    "mixed_float16": "preferred_optimal",
    "fp16": "enforce_fp16",
}
"""What MindSpore Lite calls the same modes; it has no name for the others."""


@dataclass(frozen=True)
class OmOptions:
    """How an OM file is built.

    Raises:
        ConfigError: a value that ATC does not take.
    """

    soc_version: str | None = None
    """Chip, as ATC names it: 'Ascend' and the name of `npu-smi info`, for example Ascend310P3.
    None for the chip of the host that builds."""
    batches: tuple[int, ...] = (1, 8, 32, 256)
    """Batch sizes to compile for (2 to 100 of them), or one fixed batch size."""
    precision: str = "origin"
    """One of `PRECISIONS`."""
    log: str = "error"
    """One of `LOG_LEVELS`."""
    timeout: float = 1800.0
    """Seconds that ATC may take."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", tuple(sorted(self.batches)))
        sizes_ok = all(type(b) is int and 1 <= b <= MAX_BATCH for b in self.batches)
        if not sizes_ok or not 1 <= len(set(self.batches)) == len(self.batches) <= MAX_PROFILES:
            raise ConfigError(
                f"batches = {self.batches}: give 1 to {MAX_PROFILES} different sizes from 1 to "
                f"{MAX_BATCH}"
            )
        for name, choices in (("precision", PRECISIONS), ("log", LOG_LEVELS)):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} = {value!r}: use one of {', '.join(choices)}")
        soc = self.soc_version
        if soc is not None and not (soc.startswith("Ascend") and soc.replace("_", "").isalnum()):
            raise ConfigError(
                f"soc_version = {soc!r}: give 'Ascend' and the name that `npu-smi info` shows, "
                "for example Ascend310P3"
            )

    @property
    def dynamic(self) -> bool:
        return len(self.batches) > 1


def atc_command(
    onnx: Path | str, output_prefix: Path | str, options: OmOptions, spec: PolicySpec
) -> list[str]:
    """The ATC command that builds an OM file; ATC appends '.om' to the prefix.

    Batch sizes are profiles of --dynamic_batch_size: every input has its batch first, and unlike
    --dynamic_dims the number of inputs does not count against a limit of older CANN versions.

    Raises:
        ExportError: an input has a name or a shape that ATC cannot be given.
    """
    batch = -1 if options.dynamic else options.batches[0]
    command = [
        "atc",
        "--framework=5",
        f"--model={onnx}",
        f"--output={output_prefix}",
        f"--soc_version={options.soc_version or SOC_VARIABLE}",
        "--input_format=ND",
        f"--input_shape={';'.join(_shapes(spec, batch))}",
    ]
    if options.dynamic:
        command.append(f"--dynamic_batch_size={','.join(map(str, options.batches))}")
    return [*command, f"--precision_mode_v2={options.precision}", f"--log={options.log}"]


def converter_lite_command(
    mindir: Path | str,
    output_prefix: Path | str,
    config: Path | str,
    options: OmOptions,
    spec: PolicySpec,
    *,
    target: str = "",
) -> list[str]:
    """The other route: MindSpore Lite's converter, whose file its runtime loads on Ascend.

    Args:
        mindir: the model.
        output_prefix: without '.mindir', which the converter appends.
        config: a file that holds `converter_lite_config`.
        options: batches and precision.
        spec: the policy's tensors.
        target: after `ascend_oriented`, for example '310p' or '910b'; '' for the chip that is here.
    """
    command = [
        "converter_lite",
        "--fmk=MINDIR",
        f"--modelFile={mindir}",
        f"--outputFile={output_prefix}",
        "--saveType=MINDIR",
        f"--optimize=ascend_oriented{':' if target else ''}{target}",
        f"--configFile={config}",
    ]
    if not options.dynamic:
        command.append(
            f"--inputShape={';'.join(_shapes(spec, options.batches[0], _mindir_names(spec)))}"
        )
    return command


def converter_lite_config(options: OmOptions, spec: PolicySpec) -> str:
    """The file for --configFile. Without its precision_mode the converter makes everything fp16.

    Raises:
        ConfigError: MindSpore Lite has no name for the precision.
    """
    if options.precision not in LITE_PRECISIONS:
        raise ConfigError(
            f"precision = {options.precision!r}: MindSpore Lite's converter has "
            f"{', '.join(LITE_PRECISIONS)} only; use atc"
        )
    lines = ["[ascend_context]", "input_format=ND"]
    if options.dynamic:
        shapes = (s.rpartition(":") for s in _shapes(spec, -1, _mindir_names(spec)))
        lines.append("input_shape=" + ";".join(f"{name}:[{dims}]" for name, _, dims in shapes))
        lines.append("dynamic_dims=" + ",".join(f"[{b}]" for b in options.batches))
    lines.append(f"precision_mode={LITE_PRECISIONS[options.precision]}")
    return "\n".join(lines) + "\n"


def _shapes(spec: PolicySpec, batch: int, names: Sequence[str] | None = None) -> list[str]:
    """'name:batch,d1,d2' of every input; ATC splits at semicolons and at the last colon."""
    sizes = [*(o.shape for o in spec.observations), (spec.action.noise_size,)]
    shapes = []
    for name, shape in zip(names or input_names(spec), sizes):
        if ";" in name or any(c.isspace() for c in name):
            raise ExportError(
                f"observation {name!r} has a space or semicolon in its name, which ATC cannot be "
                "given: rename the key of the observation space"
            )
        if 0 in shape:
            raise ExportError(f"observation {name!r} has shape {shape}: ATC takes no size of 0")
        shapes.append(f"{name}:{','.join(map(str, (batch, *shape)))}")
    return shapes


def _mindir_names(spec: PolicySpec) -> list[str]:
    """Inputs of a MindIR file: what follows the colon of their names there.

    They are those of the arguments `*inputs` of the Cell, as its exporter numbers them.
    """
    return [f"inputs{i}" for i in range(len(spec.observations) + 1)]
