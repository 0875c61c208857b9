from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from msrl_accel.plotting import plot_learning_curve


def metrics_of(rows: int = 20, **extra: np.ndarray) -> dict[str, np.ndarray]:
    steps = np.arange(1, rows + 1) * 1000
    returns = np.linspace(0.0, 500.0, rows)
    evaluations = np.where(np.arange(rows) % 5 == 4, returns + 10, np.nan)
    return {
        "step": steps,
        "episode/return": returns,
        "eval/return": evaluations,
        "eval/return_std": np.where(np.isfinite(evaluations), 5.0, np.nan),
        **extra,
    }


def axes_of(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_png_is_written_without_pyplot(tmp_path):
    code = """
import sys, numpy as np
from msrl_accel.plotting import plot_learning_curve
path = plot_learning_curve({"step": np.arange(3), "episode/return": np.ones(3)}, sys.argv[1])
assert str(path) == sys.argv[1]
assert "matplotlib.pyplot" not in sys.modules
"""
    target = tmp_path / "curve.png"
    subprocess.run([sys.executable, "-c", code, str(target)], check=True)
    assert target.read_bytes().startswith(b"\x89PNG\r\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["curve.png"]


def test_curve_and_evaluation_points_are_the_metrics():
    metrics = metrics_of()
    main = axes_of(plot_learning_curve(metrics, None, "PPO on X"))["PPO on X"]
    drawn = {line.get_label(): line for line in main.lines}
    np.testing.assert_array_equal(drawn["training, mean"].get_ydata(), metrics["episode/return"])
    labels = main.get_legend_handles_labels()[1]
    assert labels == ["training, mean", "evaluation ± std"]
    (container,) = main.containers
    np.testing.assert_array_equal(container[0].get_xdata(), [5000, 10000, 15000, 20000])
    assert main.get_xlabel() == "environment steps"
    assert main.get_ylabel() == "episode return"


@pytest.mark.parametrize(
    ("extra", "label"),
    [
        (("episode/return_min", "episode/return_max"), "training, min to max"),
        (("episode/return_std",), "training, ± std"),
    ],
)
def test_band(extra, label):
    figure = plot_learning_curve(metrics_of(**{name: np.full(20, 3.0) for name in extra}))
    assert label in figure.axes[0].get_legend_handles_labels()[1]


def test_panels_appear_for_what_was_logged():
    noise = np.random.default_rng(0).random(20)
    assert list(axes_of(plot_learning_curve(metrics_of(), title="t"))) == ["t"]
    some = metrics_of(**{"train/approx_kl": noise, "entropy": noise, "kl": np.full(20, np.nan)})
    assert set(axes_of(plot_learning_curve(some, title="t"))) == {"t", "KL divergence", "Entropy"}
    losses = metrics_of(**{"train/policy_loss": noise, "value_loss": noise * 1e4})
    assert set(axes_of(plot_learning_curve(losses, title="t"))) == {
        "t",
        "Policy loss",
        "Value loss",
    }


def test_panels_of_language_models_are_over_completions_and_leave_parity_out():
    noise = np.random.default_rng(0).random(20)
    logged = {"rollout/accuracy": noise, "parity/kl": noise, "grpo/kl": noise + 1}
    axes = axes_of(plot_learning_curve(metrics_of(**logged), title="t"))
    assert {a.get_xlabel() for a in axes.values()} == {"examples and completions"}
    (line,) = axes["KL divergence"].get_lines()
    np.testing.assert_array_equal(line.get_ydata(), noise + 1)
    logged = {"rollout/accuracy": noise, "parity/kl": noise}
    assert set(axes_of(plot_learning_curve(metrics_of(**logged), title="t"))) == {"t"}


@pytest.mark.parametrize("rows", [0, 1])
def test_short_runs_are_drawn(tmp_path, rows):
    assert plot_learning_curve(metrics_of(rows), tmp_path / "short.png").exists()
    assert plot_learning_curve({"step": np.arange(rows)}, tmp_path / "empty.png").exists()


def test_missing_matplotlib_warns(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(UserWarning, match=r"msrl_accel\[plot\]"):
        assert plot_learning_curve(metrics_of(), tmp_path / "x.png") is None
    assert not (tmp_path / "x.png").exists()
