"""Emulated precisions: the rounding itself, and what is recommended."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from consistency_helpers import make_policy
from hypothesis import given
from hypothesis import strategies as st
from policy_helpers import ACTION_SPACES, VECTOR, spec_of

from msrl_accel.consistency import PrecisionLimits, recommend_precision
from msrl_accel.consistency.observations import make_observations
from msrl_accel.consistency.precision import (
    bfloat16,
    half,
    int8_channels,
    parse_modes,
    rehearse_precision,
)
from msrl_accel.errors import ConfigError

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(floats)
def test_bfloat16_is_the_nearest_with_ties_to_even(x):
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    below, above = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    low, high = (struct.unpack("<f", struct.pack("<I", b))[0] for b in (below, above))
    got = float(bfloat16(np.array([x], np.float32))[0])
    remainder = bits & 0xFFFF
    if remainder != 0x8000:
        assert got == (high if remainder > 0x8000 else low)
    else:
        assert got == (high if (below >> 16) & 1 else low)


def test_bfloat16_of_what_is_no_number():
    with np.errstate(invalid="ignore"):
        got = bfloat16(np.array([np.nan, np.inf, -np.inf], np.float32))
    assert np.isnan(got[0]) and got[1:].tolist() == [np.inf, -np.inf]


def test_half_has_eleven_digits_and_overflows():
    x = np.array([1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 2**-24], np.float32)
    assert half(x).tolist() == [1.0, 1.0, 1 + 2**-9, 65504, np.inf, 2**-24]


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (3, 2, 4, 4)])
def test_int8_keeps_each_output_channel_to_half_a_step(shape):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    channels = weight.reshape(-1, 5) if len(shape) < 4 else weight.reshape(3, -1)
    channels *= np.logspace(-3, 3, len(channels), dtype=np.float32)[:, None]
    got = int8_channels(weight).reshape(channels.shape)
    step = np.abs(channels).max(axis=1, keepdims=True) / 127
    assert (np.abs(got - channels) <= 0.5001 * step).all()
    assert all(len(np.unique(np.rint(c / s))) <= 255 for c, s in zip(got, step))


def test_int8_of_a_dead_channel():
    assert int8_channels(np.zeros((2, 3), np.float32)).tolist() == np.zeros((2, 3)).tolist()


def test_names_and_short_names():
    modes = parse_modes("fp16, bf16,int8-weights,fp16")
    assert modes == ("fp16", "mixed_bfloat16", "int8-weights")
    with pytest.raises(ConfigError, match="fp8"):
        parse_modes("fp16,fp8")


def network(scale, actions="discrete"):
    """Weights of one linear layer, with logits `scale` apart."""
    spec = spec_of(ACTION_SPACES[actions], VECTOR)
    weight = np.eye(4, 3, dtype=np.float32) * scale
    arrays = {
        "actor.weight": weight,
        "actor.bias": np.zeros(4, np.float32),
        "critic.weight": np.ones((1, 3), np.float32),
        "critic.bias": np.zeros(1, np.float32),
    }
    return spec, arrays


def test_a_robust_policy_is_given_the_fastest_mode():
    spec, arrays = network(scale=2.0)
    rng = np.random.default_rng(0)
    offsets = np.array([0.0, 0.25, 0.5], np.float32)
    observations = (rng.integers(-3, 4, (500, 3)).astype(np.float32) + offsets,)
    report = rehearse_precision(spec, arrays, observations)
    assert report.recommended == "fp16"
    assert report.results["fp16"].flips == 0
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_policy_of_close_choices_keeps_its_precision():
    """Differences of 1e-4 in observations of 10: float16 has none."""
    spec, arrays = network(scale=1.0)
    rng = np.random.default_rng(0)
    observations = ((10 + 1e-4 * rng.standard_normal((500, 3))).astype(np.float32),)
    report = rehearse_precision(spec, arrays, observations)
    assert report.recommended == "origin"
    assert report.results["fp16"].flip_rate > 0.1
    assert "flips" in report.reason and "fp16" in report.reason


def test_overflow_is_seen():
    spec, arrays = network(scale=1e4)
    observations = (np.full((64, 3), 20.0, np.float32),)
    report = rehearse_precision(spec, arrays, observations)
    assert not report.results["fp16"].finite
    assert "overflows" in str(report)
    assert report.results["cube_fp16in_fp32out"].finite
    json.dumps(report.to_dict(), allow_nan=False)


def test_limits_are_the_callers():
    spec, arrays = network(scale=2.0)
    observations = make_observations(spec, "random", 200, np.random.default_rng(0))
    limits = PrecisionLimits(kl_max=0.0)
    assert rehearse_precision(spec, arrays, observations, limits=limits).recommended == "origin"


def test_recommendation_for_a_policy_graph(graph_mode):
    report = recommend_precision(make_policy("box"), rows=300)
    assert set(report.results) >= {"fp16", "mixed_bfloat16", "int8-weights"}
    errors = {name: r.action_error for name, r in report.results.items()}
    assert 0 < errors["cube_fp16in_fp32out"] < errors["mixed_bfloat16"]
    assert report._repr_html_().count("<tr>") == 1 + len(report.results)
