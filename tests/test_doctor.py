"""What msrl-doctor reads, how it judges, and that no engine can take it down."""

from __future__ import annotations

import json
import os
import stat
import sys

import pytest

from msrl_accel import ascend, doctor
from msrl_accel.ascend import CLASHES, FITS, UNKNOWN, Npu, driver_fits, mindspore_fits
from msrl_accel.runtime import load

# Widths and fields as npu-smi prints them for each product.
SMI_310P = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3                                 Version: 24.1.rc3                                     |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 8       310P3                 | OK              | NA           45                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1437 / 44280                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 8       310P3                 | Alarm           | NA           43                0     / 0             |
| 1       1                     | 0000:01:00.0    | 0            1437 / 43693                            |
+===============================+=================+======================================================+
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Chip                  | Process id      | Process name             | Process memory(MB)        |
+===============================+=================+======================================================+
| 8       0                     | 4242            | python                   | 120                       |
+===============================+=================+======================================================+
"""  # noqa: E501
SMI_910B = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.1                   Version: 24.1.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4               | OK            | 88.2        30                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          26838/ 32768         |
+===========================+===============+====================================================+
| 1     910B4               | OK            | 87.0        30                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          29356/ 32768         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
"""
SMI_A3 = """\
| npu-smi 25.2.1                   Version: 25.2.1                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     Ascend910           | OK            | 166.5       38                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3131 / 65536         |
"""
BOARD = """\
        NPU ID                         : 8
        Product Name                   : Atlas 300I Pro
        Software Version               : 24.1.rc3
        Firmware Version               : 7.5.0.1.129
        Compatibility                  : {}
        Board ID                       : 0x45
"""


def test_chips_of_a_310p_card():
    found = ascend.parse_npu_smi(SMI_310P)
    assert found.driver == "24.1.rc3"
    assert found.npus == (
        Npu(8, 0, "310P3", "OK", "0000:01:00.0"),
        Npu(8, 1, "310P3", "Alarm", "0000:01:00.0"),
    )
    assert ascend.soc_version(found.npus) == "Ascend310P3"


def test_chips_of_910b_cards():
    found = ascend.parse_npu_smi(SMI_910B)
    assert [(n.npu, n.chip, n.name) for n in found.npus] == [(0, 0, "910B4"), (1, 0, "910B4")]
    assert found.driver == "24.1.1"
    assert ascend.soc_version(found.npus) == "Ascend910B4"


def test_an_a3_hides_the_name_that_atc_wants():
    found = ascend.parse_npu_smi(SMI_A3)
    assert [n.name for n in found.npus] == ["Ascend910"]
    assert ascend.soc_version(found.npus) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dcmi module initialize failed. ret is -8005",
        "| 0     910B4 | OK |",
        "\x00\xff||||\n| x | y | z |",
        SMI_910B.split("0000:C1")[0],
    ],
)
def test_output_that_is_no_list_is_a_problem(text):
    found = ascend.parse_npu_smi(text)
    assert found.npus == ()
    assert "listed no NPU" in found.problem


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, None), ("1", (1,)), ("0,2,3", (0, 2, 3)), ("1, 2,3", (1,)), ("", ()), ("x", ())],
)
def test_visible_devices_are_read_as_cann_does(value, ids):
    assert ascend.visible_ids(value) == ids


@pytest.mark.parametrize(
    ("cann", "driver", "state"),
    [
        ("8.0.0", "24.1.0", FITS),
        ("8.0.RC3", "24.1.rc3", FITS),
        ("8.5.0", "25.2.1", FITS),
        ("9.1.0", "25.0.rc1", CLASHES),
        ("9.2.0", "25.2.0", CLASHES),
        ("9.1.0", "25.20.0", UNKNOWN),
        ("8.0.0", "22.0.4", UNKNOWN),
        ("7.0.0", "23.0.0", UNKNOWN),
    ],
)
def test_drivers_are_judged_by_the_release_notes(cann, driver, state):
    found, why = driver_fits(cann, driver)
    assert found == state
    assert cann in why


def test_mindspore_is_judged_by_its_own_list():
    assert mindspore_fits("2.10.0", "8.5.0")[0] == FITS
    assert mindspore_fits("2.10.0", "8.0.0")[0] == UNKNOWN
    assert mindspore_fits("2.11.0", "9.1.0")[0] == UNKNOWN
    assert mindspore_fits("2.9.0", "9.0.0")[0] == FITS


def install(folder, name, text):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty installation root, and no CANN in the environment."""
    monkeypatch.setattr(ascend, "INSTALL_ROOT", tmp_path)
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def ascend_machine(machine, monkeypatch):
    """CANN, driver and firmware files, and an npu-smi."""

    def make(smi=SMI_310P, cann="8.0.RC3", compatibility="OK"):
        toolkit = machine / "ascend-toolkit" / "latest" / "x86_64-linux"
        toolkit.mkdir(parents=True, exist_ok=True)
        (toolkit / "ascend_toolkit_install.info").write_text(
            f"package_name=Ascend-cann-toolkit\nversion={cann}\narch=x86_64\n"
        )
        for package, version in (("driver", "24.1.rc3"), ("firmware", "7.5.0.1.129")):
            (machine / package).mkdir(exist_ok=True)
            (machine / package / "version.info").write_text(f"Version={version}\n")
        board = BOARD.format(compatibility)
        install(
            machine / "bin",
            "npu-smi",
            f"#!/bin/sh\nif [ $# -gt 1 ]; then cat <<'E'\n{board}E\nelse cat <<'E'\n{smi}E\nfi\n",
        )
        monkeypatch.setenv("PATH", f"{machine / 'bin'}{os.pathsep}{os.environ['PATH']}")

    return make


def rows(report):
    return {(r.section, r.name): r for r in report.rows}


def test_an_ascend_machine_that_fits(ascend_machine):
    ascend_machine()
    found = rows(doctor.diagnose(run_tests=False))
    assert found["versions", "CANN"].value == "8.0.RC3"
    assert found["versions", "driver"].value == "24.1.rc3"
    assert found["versions", "firmware"].value == "7.5.0.1.129"
    assert found["compatibility", "CANN and driver"].status == "ok"
    assert found["compatibility", "driver and firmware"].status == "ok"
    assert found["devices", "NPU 8 chip 0"].status == "ok"
    assert found["devices", "NPU 8 chip 1"].status == "warning"


def test_driver_and_firmware_that_do_not_match(ascend_machine):
    ascend_machine(compatibility="NOK")
    row = rows(doctor.diagnose(run_tests=False))["compatibility", "driver and firmware"]
    assert row.status == "problem"
    assert "firmware" in row.remedy


def test_a_driver_without_devices_is_diagnosed(ascend_machine):
    ascend_machine(smi="dcmi module initialize failed. ret is -8005\n")
    row = rows(doctor.diagnose(run_tests=False))["devices", "NPU"]
    assert row.status == "problem"
    assert "-8005" in row.value
    assert "driver and firmware do not match" in row.remedy


def test_an_unknown_pair_is_said_to_be_unknown(ascend_machine):
    ascend_machine(cann="7.3.0")
    row = rows(doctor.diagnose(run_tests=False))["compatibility", "CANN and driver"]
    assert (row.status, row.value.split(":")[0]) == ("warning", "unknown")


def test_devices_that_are_hidden_or_not_there(ascend_machine, monkeypatch):
    ascend_machine(smi=SMI_910B)
    for value, status in (("1", "ok"), ("0,5", "problem"), ("all", "problem")):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", value)
        found = rows(doctor.diagnose(run_tests=False))
        assert found["devices", "ASCEND_RT_VISIBLE_DEVICES"].status == status


def test_npu_smi_that_hangs_or_fails(machine, monkeypatch):
    monkeypatch.setattr(ascend, "TIMEOUT", 0.3)
    monkeypatch.setenv("PATH", f"{machine / 'bin'}{os.pathsep}{os.environ['PATH']}")
    install(machine / "bin", "npu-smi", "#!/bin/sh\nexec sleep 30\n")
    assert "did not answer" in ascend.query_npus().problem
    install(machine / "bin", "npu-smi", "#!/bin/sh\necho no device >&2\nexit 3\n")
    assert "status 3: no device" in ascend.query_npus().problem


def test_a_machine_without_ascend_has_no_problems(machine):
    report = doctor.diagnose(run_tests=False)
    assert not [r for r in report.rows if r.status == "problem"]
    assert not report.ok


def test_what_is_missing_comes_with_its_command(machine, monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda package: None)
    found = rows(doctor.diagnose(run_tests=False))
    assert found["versions", "MindSpore"].status == "problem"
    assert found["versions", "MindSpore"].remedy.startswith("pip install")
    text = str(doctor.diagnose(run_tests=False))
    assert "-> pip install 'msrl_accel[onnx]'" in text


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('noise'); print('fine')", "ok", "fine"),
        ("raise RuntimeError('no device')", "problem", "RuntimeError: no device"),
        ("import os; os.abort()", "problem", "crashed (Aborted)"),
        ("import time; time.sleep(30)", "problem", "did not end within 1 s"),
        ("import sys; sys.exit(3)", "problem", "said nothing"),
    ],
)
def test_no_engine_takes_the_doctor_down(code, status, said):
    assert doctor.run_test([sys.executable, "-c", code], timeout=1) == (status, said)


def outcome(monkeypatch, passed):
    states = dict.fromkeys(load.BACKENDS, (True, "here"))
    monkeypatch.setattr(load, "available_backends", lambda: states)
    monkeypatch.setattr(
        doctor,
        "run_test",
        lambda command: ("ok", "fine") if command[-1] in passed else ("problem", "no"),
    )


@pytest.mark.parametrize(
    ("passed", "status"),
    [
        ({"graph", "onnx"}, 0),
        ({"graph", "lite"}, 0),
        ({"graph", "om"}, 0),
        ({"graph"}, 1),
        ({"onnx", "lite", "om"}, 1),
        (set(), 1),
    ],
)
def test_exit_status(machine, monkeypatch, capsys, passed, status):
    outcome(monkeypatch, passed)
    assert doctor.main(["--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0)
    tested = {r["name"]: r["status"] for r in report["rows"] if r["section"] == "self-tests"}
    assert {e for e, s in tested.items() if s == "ok"} == passed


def test_the_table_is_aligned_and_ends_with_a_verdict(machine, monkeypatch, capsys):
    outcome(monkeypatch, {"graph"})
    doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    versions = lines[lines.index("Versions") + 1 : lines.index("Devices") - 1]
    columns = {
        line.index(value)
        for line in versions
        for value in (doctor.platform.python_version(), doctor.package_version("numpy"))
        if line.split()[1] in ("Python", "NumPy") and value in line
    }
    assert len(columns) == 1
    assert lines[-1] == "Does not work here: deployment (one of onnx, lite, om)."


def test_self_tests_of_what_is_here(machine):
    """The real engines, each in its process."""
    report = doctor.diagnose()
    tested = {r.name: r for r in report.rows if r.section == "self-tests"}
    assert tested["graph"].status == "ok", tested["graph"]
    for engine, row in tested.items():
        assert row.status == "ok", (engine, row)
