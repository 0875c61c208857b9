"""The update: exact whatever the micro-batches, whatever the way gradients are computed."""

from __future__ import annotations

import numpy as np
import pytest
from lm_helpers import random_arrays, tiny
from lm_reference import token_log_probs
from mindspore import nn

from msrl_accel.errors import LMError
from msrl_accel.lm.adamw import AdamWOptions, DeviceAdamW, HostAdamW
from msrl_accel.lm.advantages import token_weights
from msrl_accel.lm.gradients import HeadBackward, LayerByLayer, WholeModel
from msrl_accel.lm.losses import PRESETS, PolicyLoss, loss_settings, weigh_tokens
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import Packer, Sequences
from msrl_accel.lm.update import Columns, LMUpdate, StepResult, policy_metrics

pytestmark = pytest.mark.usefixtures("graph_mode")

CONFIG = tiny(n_layers=1, max_positions=64)
UNTIED = tiny("qwen2", tie_embeddings=False, n_layers=2, max_positions=64)
LENGTHS = np.array([4, 7, 1, 5, 6, 3])
GROUPS = np.array([0, 0, 0, 1, 1, 1])
REWARDS = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.5])
MAX_LENGTH = 8
GSPO = loss_settings("gspo", kl_coef=0.1)
# With a small epsilon, rounding would decide the sign of a step where a gradient is near 0.
OPTIONS = AdamWOptions(epsilon=1e-3, weight_decay=0.01)
PACKERS = {
    "one": lambda: Packer(256),
    "several": lambda: Packer(24),
    "repeated prompts": lambda: Packer(24, share_prompts=False),
}


def make_sequences():
    rng = np.random.default_rng(0)
    return Sequences(
        prompts=[rng.integers(1, 23, n).astype(np.int32) for n in (5, 3)],
        prompt_index=GROUPS,
        tokens=rng.integers(1, 23, (6, 7)).astype(np.int32),
        lengths=LENGTHS,
        mask=np.arange(7) < LENGTHS[:, None],
    )


SEQUENCES = make_sequences()
SHAPE = SEQUENCES.tokens.shape


def make_model(config=CONFIG, seed=0):
    model = CausalLM(config, None)
    model.load_arrays(random_arrays(config, seed))
    return model


# Compiled once, used by all tests; where another loss or optimiser is wanted, it is replaced.
@pytest.fixture(scope="module")
def whole():
    return LMUpdate(make_model(), GSPO, OPTIONS, recompute=False, offload=False)


@pytest.fixture(scope="module")
def layered():
    return LMUpdate(make_model(), GSPO, OPTIONS, recompute=True, offload=True)


def reset(update, config=CONFIG):
    update.model.load_arrays(random_arrays(config))
    moments = update.state()["moments"]
    update.restore({"steps": 0, "moments": {name: 0 * a for name, a in moments.items()}})


def columns_for(settings, log_probs, shift=0.0):
    """Of a policy whose log-probabilities were up to `shift` away."""
    away = shift * np.random.default_rng(2).uniform(-1, 1, SHAPE)
    old = (log_probs + away).astype(np.float32)
    advantage, weight = weigh_tokens(
        settings, REWARDS, GROUPS, SEQUENCES.mask, MAX_LENGTH, log_probs, old, log_probs
    )
    return Columns(weight, advantage, old, old)


def one_step(update, packer, config=CONFIG):
    """Weights after a step from the start, and its result."""
    reset(update, config)
    batches = packer.pack(SEQUENCES)
    old, _ = update.log_probs(batches, SHAPE)
    result = update.step(batches, columns_for(GSPO, old, 0.6), 1e-2)
    return update.model.arrays(), result


def assert_same(first, second):
    arrays, result = first
    other_arrays, other = second
    assert result.loss == pytest.approx(other.loss, abs=1e-5)
    assert result.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    np.testing.assert_allclose(result.log_probs, other.log_probs, atol=2e-5)
    np.testing.assert_allclose(result.entropies, other.entropies, atol=2e-5)
    for name, array in arrays.items():
        np.testing.assert_allclose(array, other_arrays[name], atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def first_steps(layered):
    """Old log-probabilities under one micro-batching, and first steps under each."""
    reset(layered)
    old, _ = layered.log_probs(Packer(256).pack(SEQUENCES), SHAPE)
    columns = columns_for(GSPO, old)
    steps = [layered.step(make().pack(SEQUENCES), columns, 0.0) for make in PACKERS.values()]
    assert [s.loss for s in steps] == pytest.approx([steps[0].loss] * 3, abs=3e-6)
    return old, steps


@pytest.mark.parametrize("preset", PRESETS)
def test_in_a_first_step_the_ratio_is_one_and_nothing_is_clipped(
    preset, first_steps, layered, monkeypatch
):
    settings = PRESETS[preset]
    old, steps = first_steps
    columns = columns_for(settings, old)
    head = HeadBackward(layered.model, PolicyLoss(settings), False)
    monkeypatch.setitem(layered.gradients.head_backward, False, head)
    reset(layered)
    own = layered.step(Packer(256).pack(SEQUENCES), columns, 0.0)
    # With ratio 1 every loss is -A, but cispo's: -A log pi.
    each = columns.advantage * (old if settings.clip == "cispo" else 1.0)
    assert own.loss == pytest.approx(-(columns.weight * each).sum(), abs=3e-6)
    for result in (own, *steps):  # log-probabilities do not depend on the loss
        metrics = policy_metrics(settings, columns, result)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["ratio_error"] < 1e-5
        assert metrics["clip_fraction"] == 0.0
        assert abs(metrics["approx_kl"]) < 1e-9 and abs(metrics["kl"]) < 1e-9


def test_the_step_depends_neither_on_micro_batches_nor_on_recomputation(whole, layered):
    first, *others = (one_step(whole, make()) for make in PACKERS.values())
    for other in others:
        assert_same(other, first)
    for make in PACKERS.values():
        assert_same(one_step(layered, make()), first)


def test_untied_embeddings_and_biases_are_recomputed_alike():
    results = []
    for recompute in (False, True):
        update = LMUpdate(make_model(UNTIED), GSPO, OPTIONS, recompute=recompute)
        results.append(one_step(update, Packer(256), UNTIED))
    assert_same(*results)


def test_offloading_the_optimizer_gives_the_same_step(layered, tmp_path, monkeypatch):
    expected = one_step(layered, Packer(256))
    weights = layered.model.weights
    for other in (DeviceAdamW(weights, OPTIONS), HostAdamW(weights, OPTIONS, tmp_path)):
        monkeypatch.setattr(layered, "optimizer", other)
        assert_same(one_step(layered, Packer(256)), expected)


def test_options_choose_the_way(tmp_path):
    model = make_model()
    update = LMUpdate(model, None, OPTIONS)
    assert isinstance(update.gradients, WholeModel) and isinstance(update.optimizer, DeviceAdamW)
    update = LMUpdate(model, None, OPTIONS, recompute=True, offload_folder=tmp_path)
    assert isinstance(update.gradients, LayerByLayer) and isinstance(update.optimizer, HostAdamW)


def test_the_supervised_loss_is_the_mean_of_minus_log_pi_and_falls():
    update = LMUpdate(make_model(), None, AdamWOptions())
    batches = Packer(256).pack(SEQUENCES)
    columns = Columns(token_weights("token_mean", SEQUENCES.mask, MAX_LENGTH).astype(np.float32))
    losses = []
    for _ in range(30):
        result = update.step(batches, columns, 3e-2)
        expected = -result.log_probs[SEQUENCES.mask].mean()
        assert result.loss == pytest.approx(expected, abs=1e-5)
        losses.append(result.loss)
    assert losses[0] == pytest.approx(-reference_log_probs()[0][SEQUENCES.mask].mean(), abs=1e-4)
    assert losses[-1] < 0.3 * losses[0]


def reference_log_probs(temperature=1.0, kept=None, seed=0):
    """Log-probabilities and entropies [N, L] by the NumPy model, sequence by sequence."""
    results = np.zeros((2, *SHAPE))
    for n, length in enumerate(LENGTHS):
        prompt = SEQUENCES.prompts[GROUPS[n]]
        tokens = [*prompt, *SEQUENCES.tokens[n, :length]]
        lists = (
            None
            if kept is None
            else [range(23)] * len(prompt) + [list(k) for k in kept[n, :length]]
        )
        both = token_log_probs(CONFIG, random_arrays(CONFIG, seed), tokens, temperature, lists)
        results[:, n, :length] = np.array(both)[:, len(prompt) :]
    return results


def random_kept():
    """Five tokens for each, the drawn one among them."""
    others = np.random.default_rng(3).integers(0, 23, (*SHAPE, 4))
    return np.concatenate([SEQUENCES.tokens[..., None], others], -1).astype(np.int32)


@pytest.mark.parametrize("engine", ["whole", "layered"])
def test_log_probs_are_those_of_the_reference(engine, request):
    """With a temperature, and restricted to what sampling kept."""
    compiled = request.getfixturevalue(engine)
    reset(compiled)
    update = LMUpdate(compiled.model, GSPO, OPTIONS, temperature=0.7)
    update.gradients = compiled.gradients
    batches = Packer(256).pack(SEQUENCES)
    for kept in (None, random_kept()):
        found = update.log_probs(batches, SHAPE, kept)
        np.testing.assert_allclose(found, reference_log_probs(0.7, kept), atol=1e-4)


@pytest.mark.parametrize("engine", ["whole", "layered"])
def test_a_step_on_restricted_samples_has_ratio_one(engine, request):
    update = request.getfixturevalue(engine)
    reset(update)
    kept = random_kept()
    batches = Packer(256).pack(SEQUENCES)
    old = reference_log_probs(1.0, kept)[0]
    columns = columns_for(GSPO, old)._replace(kept=kept)
    result = update.step(batches, columns, 0.0)
    np.testing.assert_allclose(result.log_probs, old, atol=1e-4)
    metrics = policy_metrics(GSPO, columns, result)
    assert metrics["ratio_error"] < 1e-4 and metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("engine", ["whole", "layered"])
def test_a_gradient_that_is_not_finite_changes_nothing(engine, request):
    update = request.getfixturevalue(engine)
    reset(update)
    before = update.model.arrays()
    columns = columns_for(GSPO, reference_log_probs()[0])
    columns.advantage[0, 0] = np.nan
    result = update.step(Packer(256).pack(SEQUENCES), columns, 1e-2)
    assert np.isnan(result.grad_norm)
    for name, array in update.model.arrays().items():
        np.testing.assert_array_equal(array, before[name])
    state = update.state()
    assert state["steps"] == 0 and not any(m.any() for m in state["moments"].values())


def test_a_reference_in_host_arrays_needs_no_second_model(layered, tmp_path):
    reset(layered)
    arrays = random_arrays(CONFIG, seed=3)
    for name, array in arrays.items():  # on disk, and read-only
        np.save(tmp_path / name, array)
        arrays[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    batches = Packer(256).pack(SEQUENCES)
    weights = layered.frozen_weights(arrays)
    found, _ = layered.log_probs(batches, SHAPE, weights=weights)
    np.testing.assert_allclose(found, reference_log_probs(seed=3)[0], atol=1e-4)
    trained, _ = layered.log_probs(batches, SHAPE)
    np.testing.assert_allclose(trained, reference_log_probs()[0], atol=1e-4)
    del arrays["model.norm.weight"]
    with pytest.raises(LMError, match=r"weight 'model.norm.weight' is missing"):
        layered.frozen_weights(arrays)


def test_nothing_compiles_anew_while_shapes_stay(whole, layered):
    for update in (whole, layered):
        packer = Packer(24)
        batches = packer.pack(SEQUENCES)
        assert len(batches) > 1 and len(packer.shapes) == 1
        one_step(update, packer)
        before = n_graphs(update)
        for _ in range(2):
            old, _ = update.log_probs(batches, SHAPE)
            update.step(batches, columns_for(GSPO, old), 1e-3)
        assert n_graphs(update) == before


def n_graphs(update):
    cells = []
    for part in vars(update.gradients).values():
        cells += part.values() if isinstance(part, dict) else [part]
    return sum(len(cell.compile_cache) for cell in cells if isinstance(cell, nn.Cell))


def test_a_resumed_update_goes_on_as_the_first(layered):
    reset(layered)
    batches = Packer(256).pack(SEQUENCES)
    columns = columns_for(GSPO, reference_log_probs()[0], 0.3)
    layered.step(batches, columns, 1e-2)
    copy = CausalLM(CONFIG, None)
    copy.load_arrays(layered.model.arrays())
    resumed = LMUpdate(copy, GSPO, OPTIONS, offload=True)
    resumed.gradients = layered.gradients
    resumed.restore(layered.state())
    for update in (layered, resumed):
        update.step(batches, columns, 1e-2)
    for name, array in layered.model.arrays().items():
        np.testing.assert_array_equal(copy.arrays()[name], array)


def test_metrics_count_what_the_clip_stopped():
    settings = loss_settings("dapo")
    weight = np.array([[0.2, 0.2, 0.2, 0.2, 0.2, 0.0]], np.float32)
    ratio = np.array([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    advantage = np.array([[1.0, -1.0, 1.0, -1.0, 1.0, 1.0]], np.float32)
    columns = Columns(weight, advantage, np.zeros((1, 6), np.float32))
    result = update_result(np.log(ratio))
    metrics = policy_metrics(settings, columns, result)
    assert metrics["clip_fraction"] == pytest.approx(2 / 5)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["ratio_error"] == pytest.approx(0.5)
    r = ratio[0, :5]
    assert metrics["approx_kl"] == pytest.approx(np.mean(r - 1 - np.log(r)))
    dual = loss_settings("dapo", clip="dual", dual_clip=1.4)
    assert policy_metrics(dual, columns, result)["clip_fraction"] == pytest.approx(3 / 5)
    cispo = loss_settings("cispo", cispo_cap=1.2)
    assert policy_metrics(cispo, columns, result)["clip_fraction"] == pytest.approx(2 / 5)


def update_result(log_probs):
    return StepResult(0.0, log_probs, np.zeros_like(log_probs), 1.0)


def test_missing_columns_are_named():
    update = LMUpdate(make_model(), loss_settings("grpo", kl_coef=0.1), OPTIONS)
    weight = np.ones(SHAPE, np.float32)
    with pytest.raises(LMError, match=r"column\(s\) advantage, old, reference"):
        update.step([], Columns(weight), 1e-3)


def test_an_empty_batch_changes_nothing():
    model = make_model()
    before = model.arrays()
    update = LMUpdate(model, None, OPTIONS)
    result = update.step([], Columns(np.zeros((0, 1), np.float32)), 1e-3)
    assert result.loss == 0.0 and result.grad_norm == 0.0
    for name, array in model.arrays().items():
        np.testing.assert_array_equal(array, before[name])
