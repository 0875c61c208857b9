"""build_om.sh: the commands that build an OM file, for a host that has CANN."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from msrl_accel.export.atc import SOC_VARIABLE
from msrl_accel.export.manifest import file_digest
from msrl_accel.files import write_bytes_atomic

SCRIPT = "build_om.sh"

LiteRoute = Optional[tuple[Sequence[str], str, str]]
"""The converter_lite command, the name of its configuration file, and that file's content."""

_HEAD = """#!/usr/bin/env bash
# Builds {om} from {onnx} on a host with CANN (a device is not needed).
#
#   bash {script}{lite_usage}
#   SOC_VERSION=Ascend310P3 bash {script}   for another chip than the one named below or found here
#
# Copy back {om} and build_om.log; then, beside the bundle:
#   python -m msrl_accel.export.om add BUNDLE {om}
# Not yet run on a device: check the result there with msrl-check BUNDLE --backends om
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"

fail() {{ echo "{script}: $1" >&2; exit 1; }}

load_cann() {{
  command -v "$1" > /dev/null && return
  local file
  for file in "${{ASCEND_TOOLKIT_HOME:-/nowhere}}"/{{,../}}set_env.sh \\
      {{/usr/local/Ascend,"$HOME"/Ascend}}/{{cann,ascend-toolkit}}/set_env.sh; do
    if [ -f "$file" ]; then
      set +eu  # set_env.sh reads variables that may be unset
      . "$file"
      set -eu
      break
    fi
  done
  command -v "$1" > /dev/null \\
    || fail "$1 is not here: install CANN{lite_hint} and source its set_env.sh"
}}

[ -f {onnx} ] || fail "{onnx} is missing: run this in the bundle's folder"
echo "{digest}  {onnx}" | sha256sum --check --quiet - \\
  || fail "{onnx} was changed: copy it again"
"""

_LITE = """
if [ "${{1:-atc}}" = lite ]; then
  load_cann converter_lite
  cat > {config} <<'END'
{content}END
  {command}
  [ -s policy_ascend.mindir ] || fail "converter_lite wrote no policy_ascend.mindir"
  echo "policy_ascend.mindir: load it with MindSpore Lite, target ascend"
  exit 0
fi
"""

_FIND_SOC = """
load_cann atc
if [ -z "${SOC_VERSION:-}" ]; then
  listed="$(npu-smi info 2> /dev/null || true)"
  # The first row "NPU Name | Health | ..."; the row of its chip has a bus id in that place.
  name="$(awk -F'|' '$2 ~ /^ *[0-9]+ +[0-9A-Za-z]+ *$/ && $3 ~ /^ *[A-Za-z]+ *$/ {
    split($2, a, " "); print a[2]; exit }' <<< "$listed")"
  case "$name" in
    "" | Ascend*) fail "the chip is unknown: set SOC_VERSION, for example to Ascend310P3" ;;
  esac
  SOC_VERSION="Ascend$name"
fi
"""

_GIVEN_SOC = """
load_cann atc
SOC_VERSION="${{SOC_VERSION:-{soc}}}"
"""

_TAIL = """
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
here="$PWD"
command=(
{command}
)
echo "${{command[@]}}" > build_om.log
# In a folder of its own: atc leaves kernel_meta and other files where it is run.
if ! (cd "$work" && "${{command[@]}}" 2>&1) | tee -a build_om.log; then
  python3 -m msrl_accel.export.om explain build_om.log 2> /dev/null \\
    || grep -E '\\bE[0-9A-Z][0-9]{{4}}\\b' build_om.log || true
  fail "atc failed: see build_om.log"
fi
built="$(find "$work" -maxdepth 1 -name 'policy*.om' | head -n 1)"
[ -n "$built" ] || fail "atc wrote no file: see build_om.log"
mv "$built" {om}
sha256sum {om}
echo "copy {om} back and run: python -m msrl_accel.export.om add BUNDLE {om}"
"""


def write_build_script(
    target: Path, onnx: Path, command: Sequence[str], *, lite: LiteRoute = None
) -> None:
    """Write an executable script that lies beside the ONNX file.

    Args:
        target: the script, replaced atomically.
        onnx: the file that it converts; its SHA-256 goes into the script.
        command: of `atc_command` with the name of `onnx` and a relative output.
        lite: the MindSpore Lite route, run by the argument 'lite'; None leaves it out.
    """
    names = {"onnx": shlex.quote(onnx.name), "om": "policy.om", "script": target.name}
    soc = next(a.partition("=")[2] for a in command if a.startswith("--soc_version="))
    parts = [
        _HEAD.format(
            **names,
            digest=file_digest(onnx),
            lite_usage=f"\n#   bash {target.name} lite   for MindSpore Lite instead"
            if lite
            else "",
            lite_hint=" (or MindSpore Lite)" if lite else "",
        )
    ]
    if lite:
        lite_command, config, content = lite
        parts.append(_LITE.format(config=config, content=content, command=shlex.join(lite_command)))
    parts.append(_FIND_SOC if soc == SOC_VARIABLE else _GIVEN_SOC.format(soc=soc))
    lines = "\n".join(f"  {_word(a)}" for a in command)
    parts.append(_TAIL.format(**names, command=lines))
    write_bytes_atomic(target, "".join(parts).encode())
    target.chmod(0o755)


def _word(argument: str) -> str:
    """An argument as the shell reads it back, with paths made absolute and the chip filled in."""
    name, _, value = argument.partition("=")
    if name == "--soc_version":
        return f'"--soc_version={SOC_VARIABLE}"'
    if name == "--model":
        return f'"--model=$here"/{shlex.quote(value)}'
    if name == "--output":
        return f'"--output=$work"/{shlex.quote(value)}'
    return shlex.quote(argument)
