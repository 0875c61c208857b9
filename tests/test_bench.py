"""The benchmark scripts' arguments, bookkeeping and tables; nothing here is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parents[1] / "tools" / "bench"
SCRIPTS = (
    "inference",
    "ppo_cartpole",
    "ppo_throughput",
    "ppo_update",
    "publish",
    "replay",
    "sac_throughput",
    "sac_update",
)
sys.path.insert(0, str(BENCH))

import _report  # noqa: E402
import inference  # noqa: E402
import ppo_cartpole  # noqa: E402
import ppo_throughput  # noqa: E402
import ppo_update  # noqa: E402
import replay  # noqa: E402
import sac_throughput  # noqa: E402


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_common_options_without_any_peer(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{script}.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for option in ("--json", "--peer-python", "--one-cpu"):
        assert option in done.stdout
    assert "--contestant " not in done.stdout


@pytest.mark.parametrize("module", [inference, ppo_throughput, ppo_update, replay, sac_throughput])
def test_a_number_of_rounds_below_one_is_refused(module: Any) -> None:
    with pytest.raises(SystemExit):
        module.parser().parse_args(["--rounds", "0"])


def test_a_peer_interpreter_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        ppo_update.parser().parse_args(["--peer-python", "/nowhere/python"])
    assert "/nowhere/python is not an executable" in capsys.readouterr().err


def test_a_missing_peer_is_named_with_its_pip_command(capsys: pytest.CaptureFixture[str]) -> None:
    contestants = {
        "here": _report.Contestant("NumPy", "numpy"),
        "gone": _report.Contestant("Gone", "no-such-distribution"),
    }
    assert list(_report.present(contestants, sys.executable)) == ["here"]
    printed = capsys.readouterr().out
    assert "Gone is left out" in printed
    assert f"{sys.executable} -m pip install no-such-distribution" in printed


def test_table_columns_line_up() -> None:
    lines = _report.table(["", "s"], [["a", "1.00"], ["longer", "10.00"]]).splitlines()
    assert lines == ["            s", "------  -----", "a        1.00", "longer  10.00"]


def test_json_file_holds_facts_and_results(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    args = ppo_update.parser().parse_args(["--json", str(file)])
    facts = _report.begin(args, ["numpy", "no-such-distribution"])
    _report.finish(args, facts, {"graph": [1.0]})
    saved = json.loads(file.read_text())
    assert saved["results"] == {"graph": [1.0]}
    assert saved["facts"]["versions"]["numpy"] == np.__version__
    assert saved["facts"]["versions"]["no-such-distribution"] is None


def test_a_failing_child_is_reported_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text("raise ValueError('the reason')")
    with pytest.raises(_report.BenchmarkError, match="the reason"):
        _report.run_child(sys.executable, str(script), [])


def test_solved_needs_a_full_window() -> None:
    assert not ppo_cartpole.is_solved({"step": 1}, 475)
    assert not ppo_cartpole.is_solved({"episode/count": 99, "episode/return": 500.0}, 475)
    assert not ppo_cartpole.is_solved({"episode/count": 100, "episode/return": 474.9}, 475)
    assert ppo_cartpole.is_solved({"episode/count": 100, "episode/return": 475.0}, 475)


def test_reader_waits_for_the_rest_of_a_torn_row(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    reader = ppo_cartpole.RowReader(file)
    assert reader() == []
    file.write_text('{"step": 1}\n{"st')
    assert reader() == [{"step": 1}]
    file.write_text('{"step": 1}\n{"step": 2}\n')
    assert reader() == [{"step": 2}]
    assert reader() == []


_ROWS = [(256, 40, 30.0), (512, 100, 470.0), (768, 110, 480.0), (1024, 120, 490.0)]
_WRITE_ROWS = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"


def _run_fake(monkeypatch: pytest.MonkeyPatch, code: str, threshold: float) -> ppo_cartpole.Outcome:
    """`time_to_solve` of a process that writes `_ROWS`."""
    rows = [{"step": s, "episode/count": n, "episode/return": r} for s, n, r in _ROWS]
    text = "".join(json.dumps(row) + "\n" for row in rows)

    def command(name: str, seed: int, args: Any, folder: Path) -> tuple[list[str], Path]:
        return [sys.executable, "-c", code, str(folder / "rows"), text], folder / "rows"

    monkeypatch.setattr(ppo_cartpole, "command", command)
    args = ppo_cartpole.parser().parse_args(["--threshold", str(threshold)])
    return ppo_cartpole.time_to_solve("ours", 3, args)


def test_first_row_over_the_threshold_stops_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _run_fake(monkeypatch, _WRITE_ROWS + "; import time; time.sleep(60)", 475)
    assert (outcome.seed, outcome.steps, outcome.solved) == (3, 768, True)
    assert not str(outcome).startswith(">")


def test_a_run_that_ends_below_the_threshold_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _run_fake(monkeypatch, _WRITE_ROWS, 495)
    assert (outcome.steps, outcome.solved) == (1024, False)
    assert str(outcome).startswith(">")
    assert "> not reached" in ppo_cartpole.report({"ours": [outcome]})


def test_a_contestant_that_crashes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(_report.BenchmarkError, match="out of luck"):
        _run_fake(monkeypatch, "raise RuntimeError('out of luck')", 475)


def test_overrides_reach_the_training_command() -> None:
    words = ["--ours-set", "ppo.n_steps=64", "--ours-set", "ppo.gamma=0.9", "--ours-n-envs", "16"]
    args = ppo_cartpole.parser().parse_args(words)
    command, rows = ppo_cartpole.command("ours", 5, args, Path("folder"))
    text = " ".join(command)
    assert "-m msrl_accel.train --algo ppo --env CartPole-v1 --seed 5" in text
    assert "--n-envs 16 --set ppo.n_steps=64 --set ppo.gamma=0.9" in text
    assert rows == Path("folder/run/metrics.jsonl")


def test_cartpole_ratios_are_of_means() -> None:
    runs = {
        "ours": [ppo_cartpole.Outcome(s, x, 100, True, 1.5) for s, x in enumerate((2.0, 4.0))],
        "sb3": [ppo_cartpole.Outcome(s, x, 100, True, 1.5) for s, x in enumerate((10.0, 30.0))],
    }
    ours, sb3 = ppo_cartpole.report(runs).splitlines()[2:]
    assert ours.split() == ["msrl_accel", "2.00", "4.00", "3.00", "0.15", "1.50", "100"]
    assert sb3.split() == ["stable-baselines3", "10.00", "30.00", "20.00", "1.00", "1.50", "100"]


def test_throughput_ratios_are_to_the_peer_in_the_same_environment() -> None:
    def result(name: str, env: str, rates: list[float]) -> dict[str, Any]:
        warmup = [1.0] * len(rates)
        return {
            "contestant": name,
            "env": env,
            "n_envs": 8,
            "steps_per_second": rates,
            "warmup_seconds": warmup,
        }

    lines = ppo_throughput.report(
        [
            result("ours", "CartPole-v1", [100.0, 300.0, 200.0]),
            result("sb3", "CartPole-v1", [50.0, 50.0, 10.0]),
            result("ours", "HalfCheetah-v5", [1.0]),
        ]
    ).splitlines()
    assert lines[2].split() == ["msrl_accel", "CartPole-v1", "8", "200", "(100-300)", "4.00", "1.0"]
    assert lines[4].split()[-2] == "-"


def test_throughput_counts_whole_iterations() -> None:
    args = ppo_throughput.parser().parse_args(["--n-envs", "64"])
    rate = ppo_throughput._rate(args, [10.0, 11.0, 14.0], 2.0)
    assert rate == {"steps_per_second": 2 * 32 * 64 / 4.0, "warmup_seconds": 2.0}


def test_update_ratios_are_taken_round_by_round() -> None:
    lines = ppo_update.report({"graph": [1.0, 4.0], "lean": [2.0, 4.0]}).splitlines()
    assert lines[2].endswith("0.75 (0.50-1.00)")
    assert lines[3].endswith("1.00 (1.00-1.00)")


def test_timed_cell_passes_calls_and_attributes_on() -> None:
    class Output:
        def asnumpy(self) -> np.ndarray:
            return np.zeros(1)

    class Cell:
        norms = "norms"

        def __call__(self, a: int, b: int) -> Output:
            assert (a, b) == (1, 2)
            return Output()

    cell = ppo_update.TimedCell(Cell())
    assert isinstance(cell(1, 2), Output)
    assert cell.norms == "norms"
    assert cell.seconds > 0


def test_ours_is_measured_on_the_library_as_it_is() -> None:
    words = ["--contestant", "ours", "--blocks", "1", "--epochs", "1"]
    measured = ppo_update.measure_ours(ppo_update.parser().parse_args(words))
    assert set(measured) == {"graph", "whole"}
    assert measured["whole"] > measured["graph"] > 0


def test_latencies_are_of_every_batch_and_of_single_observations_without_a_batch_dimension() -> (
    None
):
    shapes = set()
    found = inference.latencies(lambda x: shapes.add(x.shape), calls=4)
    assert shapes == {(4,), (32, 4), (256, 4)}
    assert list(found) == ["1", "32", "256"]
    assert all(0 < f["p50"] <= f["p99"] for f in found.values())


def test_latency_ratios_are_taken_turn_by_turn() -> None:
    def turn(p50: float) -> dict[str, dict[str, float]]:
        return {str(b): {"p50": p50, "p99": 2 * p50} for b in inference.BATCHES}

    peer = inference.PEERS[inference.BASELINE].label
    text = inference.report({"ours": [turn(10), turn(20)], peer: [turn(100), turn(400)]})
    (line, *_) = [line for line in text.splitlines() if line.startswith("ours")]
    assert line.split() == ["ours", "15.0", "30.0", "15.0", "(10.0-20.0)"]
    assert "speed" not in inference.report({"ours": [turn(10)]})


@pytest.mark.parametrize("kind", replay.KINDS)
def test_every_kind_of_replay_is_measured(kind: str) -> None:
    words = ["--contestant", kind, "--transitions", "600", "--blocks", "1", "--calls", "1"]
    found = replay.measure_ours(replay.parser().parse_args(words))
    assert set(found) == {"add", "single", "stacked"}
    assert min(found.values()) > 0


def test_replay_ratios_are_taken_turn_by_turn() -> None:
    def turn(**speeds: float) -> dict[str, float]:
        return {"add": 5.0, **speeds}

    lines = replay.report(
        {
            "uniform": [turn(single=100.0, stacked=300.0), turn(single=800.0, stacked=500.0)],
            "sb3": [turn(single=50.0), turn(single=200.0)],
        }
    ).splitlines()
    assert lines[2].endswith("3.00 (2.00-4.00)     400 (300-500)")
    assert lines[3].endswith("1.00 (1.00-1.00)                 -")


def test_sac_throughput_ratios_are_taken_round_by_round() -> None:
    lines = sac_throughput.report({"ours": [200.0, 300.0], "sb3": [100.0, 100.0]}).splitlines()
    assert lines[2].endswith("250 (200-300)                         -")
    assert lines[3].endswith("100 (100-100)                      2.50")
