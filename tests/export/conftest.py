from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from policy_helpers import ACTION_SPACES, spec_of

FAKE = Path(__file__).with_name("fake_atc.py")


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """The stand-ins for atc and npu-smi on PATH; the folder that they are in."""
    from om_helpers import NPU_SMI_310P, install

    folder = tmp_path / "cann bin"
    source = FAKE.read_text().split("\n", 1)[1]
    install(folder, "atc", f"#!{sys.executable}\n{source}")
    install(folder, "npu-smi", f"#!/bin/sh\ncat <<'END'\n{NPU_SMI_310P}END\n")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ATC_SAW", str(tmp_path / "saw.json"))
    return folder


@pytest.fixture
def no_cann(monkeypatch, tmp_path):
    """No CANN in the usual places."""
    from msrl_accel import ascend

    monkeypatch.setattr(ascend, "INSTALL_ROOT", tmp_path / "nothing")
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def bundle_folder(tmp_path):
    """A folder with the ONNX file of a policy; the file, and the policy's tensors."""
    pytest.importorskip("onnx")
    from om_helpers import DICT, write_onnx

    spec = spec_of(ACTION_SPACES["discrete"], DICT)
    folder = tmp_path / "my bundle"
    folder.mkdir()
    return folder, write_onnx(folder / "policy.onnx", spec), spec
