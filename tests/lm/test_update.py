"""The update: exact whatever the micro-batches, whatever the way gradients are computed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from msrl_accel.errors import LMError
from msrl_accel.lm.adamw import AdamWOptions
from msrl_accel.lm.advantages import token_weights
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.gradients import HeadBackward
from msrl_accel.lm.losses import PRESETS, PolicyLoss, loss_settings, weigh_tokens
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import Packer, Sequences
from msrl_accel.lm.update import Columns, LMUpdate, StepResult, policy_metrics

pytestmark = pytest.mark.usefixtures("graph_mode")

CONFIG = LMConfig(
    architecture="llama",
    vocab_size=13,
    hidden_size=16,
    intermediate_size=24,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    tie_embeddings=True,
    max_positions=64,
)
DEEPER = dataclasses.replace(CONFIG, n_layers=2)
UNTIED = dataclasses.replace(DEEPER, tie_embeddings=False, qkv_bias=True)
LENGTHS = np.array([4, 7, 1, 5, 6, 3])
GROUPS = np.array([0, 0, 0, 1, 1, 1])
REWARDS = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.5])
MAX_LENGTH = 8
OPTIONS = AdamWOptions(weight_decay=0.01)
PACKERS = {
    "one": lambda: Packer(256),
    "several": lambda: Packer(24),
    "repeated prompts": lambda: Packer(24, share_prompts=False),
}


def make_sequences():
    rng = np.random.default_rng(0)
    return Sequences(
        prompts=[rng.integers(1, 13, n).astype(np.int32) for n in (5, 3)],
        prompt_index=GROUPS,
        tokens=rng.integers(1, 13, (6, 7)).astype(np.int32),
        lengths=LENGTHS,
        mask=np.arange(7) < LENGTHS[:, None],
    )


SEQUENCES = make_sequences()
SHAPE = SEQUENCES.tokens.shape


def make_model(config=CONFIG, seed=0):
    model = CausalLM(config, seed)
    rng = np.random.default_rng(1)
    # Larger than at the start of training, so that every part matters.
    model.load_arrays(
        {k: 5 * a + 0.1 * rng.standard_normal(a.shape) for k, a in model.arrays().items()}
    )
    return model


def columns_for(settings, log_probs, shift=0.0):
    """Of a policy whose log-probabilities were up to `shift` away."""
    away = shift * np.random.default_rng(2).uniform(-1, 1, SHAPE)
    old = (log_probs + away).astype(np.float32)
    advantage, weight = weigh_tokens(
        settings, REWARDS, GROUPS, SEQUENCES.mask, MAX_LENGTH, log_probs, old, log_probs
    )
    return Columns(weight, advantage, old, old)


@functools.cache
def cached_update(settings, config, **options):
    """Compiled once, used by several tests."""
    return LMUpdate(make_model(config), settings, OPTIONS, **options)


def one_step(packer, settings, config=CONFIG, **options):
    """Weights after a step from the start, and its result."""
    update = cached_update(settings, config, **options)
    update.model.load_arrays(make_model(config).arrays())
    state = update.state()
    update.restore({"steps": 0, "moments": {k: 0 * a for k, a in state["moments"].items()}})
    batches = packer.pack(SEQUENCES)
    old, _ = update.log_probs(batches, SHAPE)
    result = update.step(batches, columns_for(settings, old, 0.6), 1e-2)
    return update.model.arrays(), result


def assert_same(first, second, tolerance=2e-5):
    arrays, result = first
    other_arrays, other = second
    assert result.loss == pytest.approx(other.loss, abs=1e-5)
    assert result.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    np.testing.assert_allclose(result.log_probs, other.log_probs, atol=1e-5)
    np.testing.assert_allclose(result.entropies, other.entropies, atol=1e-5)
    for name, array in arrays.items():
        np.testing.assert_allclose(array, other_arrays[name], atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def shared():
    """An update whose loss is exchanged: only its head is then compiled anew."""
    return LMUpdate(make_model(), PRESETS["grpo"], OPTIONS, recompute=True, offload=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_in_a_first_step_the_ratio_is_one_and_nothing_is_clipped(preset, shared):
    """Under every micro-batching, even when the old policy was evaluated under another."""
    settings = PRESETS[preset]
    old, _ = shared.log_probs(Packer(256).pack(SEQUENCES), SHAPE)
    columns = columns_for(settings, old)
    shared.gradients.head_backward[False] = HeadBackward(shared.model, PolicyLoss(settings), False)
    losses = []
    for make_packer in PACKERS.values():
        result = shared.step(make_packer().pack(SEQUENCES), columns, 0.0)
        metrics = policy_metrics(settings, columns, result)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["ratio_error"] < 1e-5
        assert metrics["clip_fraction"] == 0.0
        assert abs(metrics["approx_kl"]) < 1e-9 and abs(metrics["kl"]) < 1e-9
        losses.append(result.loss)
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


GSPO = loss_settings("gspo", kl_coef=0.1)


def test_the_step_does_not_depend_on_the_micro_batches():
    first, *others = (one_step(make(), GSPO) for make in PACKERS.values())
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("config", [DEEPER, UNTIED], ids=["tied", "untied with biases"])
def test_recomputing_layer_by_layer_gives_the_same_step(config):
    whole = one_step(Packer(24), GSPO, config, recompute=False)
    assert_same(one_step(Packer(24), GSPO, config, recompute=True), whole)


def test_offloading_the_optimizer_gives_the_same_step(tmp_path):
    device = one_step(Packer(256), GSPO, recompute=True, offload=False)
    assert_same(one_step(Packer(256), GSPO, recompute=True, offload=True), device)
    files = one_step(Packer(256), GSPO, recompute=True, offload_folder=tmp_path)
    assert_same(files, device)


def test_the_supervised_loss_is_the_mean_of_minus_log_pi_and_falls():
    model = make_model()
    update = LMUpdate(model, None, AdamWOptions())
    batches = Packer(24).pack(SEQUENCES)
    columns = Columns(token_weights("token_mean", SEQUENCES.mask, MAX_LENGTH).astype(np.float32))
    losses = []
    for _ in range(30):
        log_probs, _ = update.log_probs(batches, SHAPE)
        result = update.step(batches, columns, 3e-2)
        losses.append(result.loss)
        expected = -log_probs[SEQUENCES.mask].mean()
        assert result.loss == pytest.approx(expected, abs=1e-5)
        np.testing.assert_allclose(result.log_probs, log_probs, atol=1e-5)
    assert losses[-1] < 0.3 * losses[0]


def test_log_probs_are_those_of_each_sequence_alone():
    model = make_model()
    update = LMUpdate(model, None, AdamWOptions(), recompute=True)
    log_probs, entropies = update.log_probs(Packer(256).pack(SEQUENCES), SHAPE)
    for n, length in enumerate(LENGTHS):
        alone = Sequences(
            SEQUENCES.prompts,
            GROUPS[n : n + 1],
            SEQUENCES.tokens[n : n + 1],
            LENGTHS[n : n + 1],
            SEQUENCES.mask[n : n + 1],
        )
        found, entropy = update.log_probs(Packer(32).pack(alone), (1, SHAPE[1]))
        np.testing.assert_allclose(log_probs[n], found[0], atol=1e-5)
        np.testing.assert_allclose(entropies[n], entropy[0], atol=1e-5)
        assert np.all(log_probs[n, :length] < 0) and not log_probs[n, length:].any()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_reference_in_host_arrays_needs_no_second_model(recompute, tmp_path):
    model, other = make_model(), make_model(seed=3)
    batches = Packer(256).pack(SEQUENCES)
    expected, _ = LMUpdate(other, None, AdamWOptions()).log_probs(batches, SHAPE)
    arrays = other.arrays()
    for name, array in arrays.items():  # on disk, and read-only
        np.save(tmp_path / name, array)
        arrays[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    update = LMUpdate(model, None, AdamWOptions(), recompute=recompute)
    weights = update.frozen_weights(arrays)
    found, _ = update.log_probs(batches, SHAPE, weights=weights)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    trained, _ = update.log_probs(batches, SHAPE)
    assert np.abs(trained - expected).max() > 0.1
    del arrays["model.norm.weight"]
    with pytest.raises(LMError, match=r"weight 'model.norm.weight' is missing"):
        update.frozen_weights(arrays)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_kept_set_restricts_the_distribution(recompute):
    update = LMUpdate(make_model(), loss_settings("grpo"), OPTIONS, recompute=recompute)
    batches = Packer(256).pack(SEQUENCES)
    free, _ = update.log_probs(batches, SHAPE)
    others = np.arange(13)[None, None, :4] + np.zeros((*SHAPE, 1), int)
    kept = np.concatenate([SEQUENCES.tokens[..., None], others], -1).astype(np.int32)
    old, _ = update.log_probs(batches, SHAPE, kept)
    assert np.all(old[SEQUENCES.mask] > free[SEQUENCES.mask])
    columns = columns_for(update.settings, old)._replace(kept=kept)
    result = update.step(batches, columns, 0.0)
    np.testing.assert_allclose(result.log_probs, old, atol=1e-5)
    assert policy_metrics(update.settings, columns, result)["ratio_error"] < 1e-5


def test_temperature_divides_the_logits():
    model = make_model()
    batches = Packer(256).pack(SEQUENCES)
    update = LMUpdate(model, None, OPTIONS, temperature=100.0, recompute=True)
    hot, entropy = update.log_probs(batches, SHAPE)
    np.testing.assert_allclose(hot[SEQUENCES.mask], -np.log(13), atol=0.5)
    np.testing.assert_allclose(entropy[SEQUENCES.mask], np.log(13), atol=0.05)


def test_nothing_compiles_anew_while_shapes_stay():
    update = LMUpdate(make_model(DEEPER), loss_settings("grpo"), OPTIONS, recompute=True)
    packer = Packer(24)
    batches = packer.pack(SEQUENCES)
    for _ in range(3):
        old, _ = update.log_probs(batches, SHAPE)
        update.step(batches, columns_for(update.settings, old), 1e-3)
    engine = update.gradients
    cells = (engine.tables, engine.layer, engine.layer_backward, engine.head[False])
    assert len(batches) > 1 and len(packer.shapes) == 1
    assert [len(cell.compile_cache) for cell in cells] == [1, 1, 1, 1]
    assert len(engine.head_backward[False].compile_cache) == 1


def test_a_resumed_update_goes_on_as_the_first():
    settings = loss_settings("grpo")
    batches = Packer(256).pack(SEQUENCES)
    model = make_model()
    update = LMUpdate(model, settings, OPTIONS, recompute=True)
    old, _ = update.log_probs(batches, SHAPE)
    columns = columns_for(settings, old, 0.3)
    update.step(batches, columns, 1e-2)
    copy = CausalLM(CONFIG, None)
    copy.load_arrays(model.arrays())
    resumed = LMUpdate(copy, settings, OPTIONS, recompute=True)
    resumed.restore(update.state())
    update.step(batches, columns, 1e-2)
    resumed.step(batches, columns, 1e-2)
    for name, array in model.arrays().items():
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
