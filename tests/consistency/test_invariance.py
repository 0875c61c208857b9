"""Results that do not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest
from consistency_helpers import make_policy
from policy_helpers import VECTOR

from msrl_accel.consistency.compare import named
from msrl_accel.consistency.invariance import ROWS, check_batch_invariance, measure_cost
from msrl_accel.consistency.observations import make_observations
from msrl_accel.consistency.reference import NumpyPolicy
from msrl_accel.errors import PolicyError
from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime, measure_tiles


def inputs(spec, rows, seed=0):
    rng = np.random.default_rng(seed)
    return make_observations(spec, "random", rows, rng), spec.draw_noise(rng, (rows,))


class Uneven(NumpyPolicy):
    """An engine whose last bits depend on the batch: small ones, and the last rows of odd ones."""

    def act(self, observations, noise):
        result = super().act(observations, noise)
        if len(noise) < 16:
            result.value = np.nextafter(result.value, np.float32(np.inf))
        if len(noise) % 2:
            result.value[-1:] += 1
        return result


class Placed(NumpyPolicy):
    """An engine whose last row is never like the others."""

    def act(self, observations, noise):
        result = super().act(observations, noise)
        result.value[-1:] += 1
        return result


def linear(kind):
    from policy_helpers import ACTION_SPACES, spec_of

    spec = spec_of(ACTION_SPACES["box"], VECTOR)
    rng = np.random.default_rng(0)
    # Whole numbers: sums are exact in any order.
    weights = {
        "actor.weight": rng.integers(-4, 5, (2, 3)),
        "actor.bias": rng.integers(-4, 5, 2),
        "critic.weight": rng.integers(-4, 5, (1, 3)),
        "critic.bias": rng.integers(-4, 5, 1),
        "log_std": np.zeros(2),
    }
    return kind(spec, {k: v.astype(np.float32) for k, v in weights.items()})


def test_tiles_are_the_sizes_that_agree():
    runtime = linear(Uneven)
    assert measure_tiles(runtime) == (16, 32, 64, 128, 256)
    observations, noise = inputs(runtime.spec, 2000)
    assert not check_batch_invariance(runtime, observations, noise).ok
    result = check_batch_invariance(BatchInvariantRuntime(runtime), observations, noise)
    assert result.ok and result.rows == 2000 and result.tiles[0] == 16


def test_no_tile():
    with pytest.raises(PolicyError, match="every place"):
        measure_tiles(linear(Placed), (8, 4, 2))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 256, 257, 600])
def test_results_are_those_of_the_engine(rows):
    runtime = linear(NumpyPolicy)
    observations, noise = inputs(runtime.spec, rows)
    got = BatchInvariantRuntime(runtime, tiles=(16, 256)).act(observations, noise)
    expected = runtime.act(observations, noise)
    for name, output in named(runtime.spec, expected).items():
        np.testing.assert_allclose(
            named(runtime.spec, got)[name], output, rtol=1e-5, atol=1e-5, err_msg=name
        )


def test_weights_pass_through():
    runtime = linear(NumpyPolicy)
    invariant = BatchInvariantRuntime(runtime, tiles=(8,))
    arrays = {k: np.zeros_like(v) for k, v in runtime._arrays.items()}
    invariant.load_weights(7, arrays)
    observations, noise = inputs(runtime.spec, 3)
    assert invariant.version == runtime.version == 7
    assert (invariant.act(observations, noise).value == 0).all()


def test_an_empty_batch_is_refused():
    runtime = linear(NumpyPolicy)
    observations, noise = inputs(runtime.spec, 0)
    with pytest.raises(PolicyError, match="empty"):
        BatchInvariantRuntime(runtime, tiles=(8,)).act(observations, noise)


@pytest.mark.parametrize("engine", ["graph", "mindir", "onnx", "lite"])
def test_ten_thousand_rows_have_one_result_each(graph_mode, engine, tmp_path):
    policy = make_policy("box", hidden_sizes=(64, 64), activation="tanh")
    runtime = open_engine(engine, policy, tmp_path)
    try:
        invariant = BatchInvariantRuntime(runtime)
        observations, noise = inputs(policy.spec, ROWS)
        result = check_batch_invariance(invariant, observations, noise)
        assert result.ok, f"{engine}: {result}"
        assert set(measure_cost(runtime, invariant, (1, 32), calls=3)) == {1, 32}
    finally:
        runtime.close()


def open_engine(engine, policy, folder):
    from msrl_accel.export.mindir import export_mindir
    from msrl_accel.runtime.graph import GraphRuntime

    if engine == "graph":
        return GraphRuntime(policy)
    if engine == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
        from msrl_accel.export.onnx import export_onnx
        from msrl_accel.runtime.onnx import OnnxRuntime

        export_onnx(policy, folder / "policy.onnx")
        return OnnxRuntime(folder / "policy.onnx", policy.spec)
    export_mindir(policy, folder / "policy.mindir", batch=1 if engine == "lite" else None)
    if engine == "mindir":
        from msrl_accel.runtime.mindir import MindirRuntime

        return MindirRuntime(folder / "policy.mindir", policy.spec)
    from msrl_accel.export.lite import write_lite_mindir
    from msrl_accel.runtime import lite

    if not lite.available()[0]:
        pytest.skip(lite.available()[1])
    import mindspore

    level = lite.mindir_level(mindspore.__version__)
    write_lite_mindir(folder / "policy.mindir", folder / "lite.mindir", level=level)
    return lite.LiteRuntime(folder / "lite.mindir", policy.spec)
