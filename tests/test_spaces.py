from __future__ import annotations

import json
import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from msrl_accel.errors import PolicyError, SpaceError
from msrl_accel.spaces import PolicySpec

DISCRETE = spaces.Discrete(2)
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)


def observation_spec(space):
    return PolicySpec.from_spaces(space, DISCRETE).observations


def action_spec(space):
    return PolicySpec.from_spaces(VECTOR, space).action


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "is_image", "hwc"),
    [
        (spaces.Box(-1, 1, (4,), np.float32), (4,), "float32", False, None),
        (spaces.Box(-1, 1, (2, 3), np.float64), (2, 3), "float32", False, None),
        (spaces.Box(-5, 5, (1,), np.int64), (1,), "float32", False, None),
        (spaces.Box(0, 1, (), np.float32), (), "float32", False, None),
        (spaces.Box(0, 255, (6,), np.uint8), (6,), "float32", False, None),
        (spaces.Box(0, 255, (84, 84, 3), np.uint8), (84, 84, 3), "uint8", True, (84, 84, 3)),
        (spaces.Box(0, 255, (4, 84, 72), np.uint8), (4, 84, 72), "uint8", True, (84, 72, 4)),
        (spaces.Box(0, 255, (40, 36), np.uint8), (40, 36), "uint8", True, (40, 36, 1)),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), (4, 4, 3), "uint8", False, None),
        (spaces.Box(0, 1, (84, 84, 3), np.float32), (84, 84, 3), "float32", False, None),
    ],
)
def test_a_box_observation_is_described(space, shape, dtype, is_image, hwc):
    (spec,) = observation_spec(space)
    assert (spec.name, spec.shape, spec.dtype) == ("observation", shape, dtype)
    assert spec.size == np.prod(shape)
    assert spec.is_image == is_image
    if hwc is not None:
        assert spec.hwc == hwc


def test_a_dict_observation_is_ordered_by_sorted_keys():
    camera = spaces.Box(0, 255, (8, 8), np.uint8)
    space = spaces.Dict([("z", VECTOR), ("Camera", camera), ("a", VECTOR)])  # keeps this order
    spec = PolicySpec.from_spaces(space, DISCRETE)
    assert [o.name for o in spec.observations] == ["Camera", "a", "z"]
    sample = space.sample()
    given_tuple = spec.as_tuple(sample)
    for observation, array in zip(spec.observations, given_tuple):
        np.testing.assert_array_equal(array, sample[observation.name])


def test_the_description_does_not_depend_on_the_hash_seed():
    program = (
        "import json, numpy as np\n"
        "from gymnasium import spaces\n"
        "from msrl_accel.spaces import PolicySpec\n"
        "box = spaces.Box(-1, 1, (2,), np.float32)\n"
        "keys = {'velocity', 'camera', 'position', 'goal', 'battery'}\n"
        "space = spaces.Dict([(k, box) for k in keys])  # pairs keep their order\n"
        "print(json.dumps(PolicySpec.from_spaces(space, spaces.Discrete(2)).to_dict()))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (0, 1, 42)
    }
    assert len(outputs) == 1
    names = [o["name"] for o in json.loads(outputs.pop())["observations"]]
    assert names == ["battery", "camera", "goal", "position", "velocity"]


@pytest.mark.parametrize(
    ("space", "kind", "sizes", "starts", "raw_shape", "noise_size"),
    [
        (spaces.Discrete(4), "discrete", (4,), (0,), (), 4),
        (spaces.Discrete(3, start=-1), "discrete", (3,), (-1,), (), 3),
        (spaces.Discrete(1, start=2), "discrete", (1,), (2,), (), 1),
        (spaces.MultiDiscrete([3, 2]), "multi_discrete", (3, 2), (0, 0), (2,), 5),
        (
            spaces.MultiDiscrete(np.array([[3, 2], [1, 4]]), start=np.array([[1, 0], [5, -2]])),
            "multi_discrete",
            (3, 2, 1, 4),
            (1, 0, 5, -2),
            (4,),
            10,
        ),
        (spaces.MultiBinary(3), "multi_binary", (), (), (3,), 3),
        (spaces.MultiBinary((2, 3)), "multi_binary", (), (), (6,), 6),
        (spaces.Box(-1, 1, (2, 2), np.float64), "continuous", (), (), (4,), 4),
    ],
)
def test_an_action_space_is_described(space, kind, sizes, starts, raw_shape, noise_size):
    spec = action_spec(space)
    assert (spec.kind, spec.sizes, spec.starts) == (kind, sizes, starts)
    assert spec.shape == space.shape
    assert np.dtype(spec.dtype) == space.dtype
    assert spec.raw_shape == raw_shape
    assert spec.noise_size == noise_size


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        ([-1.0, 0.0], [3.0, 0.5], np.float32),
        ([0.0, 0.0], [1.0, 1.0], np.float64),
        ([-np.inf, -2.0], [1.0, np.inf], np.float32),
        ([-np.inf, -np.inf], [np.inf, np.inf], np.float64),
    ],
)
def test_box_action_bounds_are_kept_exactly(low, high, dtype):
    space = spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
    spec = action_spec(space)
    np.testing.assert_array_equal(np.array(spec.low, dtype), space.low)
    np.testing.assert_array_equal(np.array(spec.high, dtype), space.high)
    assert np.dtype(spec.dtype) == dtype


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple((VECTOR, VECTOR)),
        spaces.Text(5),
        spaces.Graph(VECTOR, None),
        spaces.Discrete(3),
        spaces.Dict({"inner": spaces.Dict({"x": VECTOR})}),
        spaces.Dict({"goal": spaces.Discrete(3)}),
    ],
)
def test_an_unsupported_observation_space_is_named_with_what_is_supported(space):
    with pytest.raises(SpaceError) as error:
        PolicySpec.from_spaces(space, DISCRETE)
    named = next(iter(space.spaces.values())) if isinstance(space, spaces.Dict) else space
    assert str(named) in str(error.value)
    assert "Box" in str(error.value)
    assert "Dict" in str(error.value)


def test_the_key_of_an_unsupported_entry_is_named():
    with pytest.raises(SpaceError, match="'goal'"):
        PolicySpec.from_spaces(spaces.Dict({"goal": spaces.Discrete(3), "x": VECTOR}), DISCRETE)


def test_an_empty_dict_is_refused():
    with pytest.raises(SpaceError, match="empty"):
        PolicySpec.from_spaces(spaces.Dict({}), DISCRETE)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 5, (2,), np.int32),
        spaces.Tuple((DISCRETE, DISCRETE)),
        spaces.Dict({"a": DISCRETE}),
        spaces.Text(3),
    ],
)
def test_an_unsupported_action_space_is_named_with_what_is_supported(space):
    with pytest.raises(SpaceError) as error:
        PolicySpec.from_spaces(VECTOR, space)
    assert str(space) in str(error.value)
    for supported in ("Discrete", "MultiDiscrete", "MultiBinary", "Box"):
        assert supported in str(error.value)


SIDES = st.integers(1, 4)
SHAPES = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)
BOUND = st.floats(-100, 100, width=32) | st.just(np.inf)


@st.composite
def box_actions(draw):
    dtype = draw(st.sampled_from([np.float32, np.float64, np.float16]))
    shape = draw(SHAPES)
    low = draw(hnp.arrays(np.float64, shape, elements=st.floats(-100, 100)))
    span = draw(hnp.arrays(np.float64, shape, elements=st.floats(0.125, 100)))
    open_low = draw(hnp.arrays(bool, shape))
    open_high = draw(hnp.arrays(bool, shape))
    high = np.where(open_high, np.inf, low + span).astype(dtype)
    low = np.where(open_low, -np.inf, low).astype(dtype)
    return spaces.Box(low, np.maximum(low, high), shape, dtype)


@st.composite
def multi_discretes(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
    nvec = draw(hnp.arrays(np.int64, shape, elements=st.integers(1, 6)))
    start = draw(hnp.arrays(np.int64, shape, elements=st.integers(-10, 10)))
    return spaces.MultiDiscrete(nvec, start=start)


ACTION_SPACES = st.one_of(
    st.builds(lambda n, s: spaces.Discrete(n, start=s), st.integers(1, 9), st.integers(-9, 9)),
    multi_discretes(),
    st.one_of(st.integers(1, 5), st.tuples(SIDES, SIDES)).map(spaces.MultiBinary),
    box_actions(),
)


@st.composite
def box_observations(draw):
    dtype = draw(st.sampled_from([np.float32, np.float64, np.uint8, np.int16, np.int64]))
    return spaces.Box(0, 100, draw(SHAPES), dtype)


OBSERVATION_SPACES = box_observations() | st.dictionaries(
    st.text("abcXYZ_0", min_size=1, max_size=5), box_observations(), min_size=1, max_size=4
).map(spaces.Dict)


@settings(max_examples=150, deadline=None)
@given(OBSERVATION_SPACES, ACTION_SPACES)
def test_the_json_description_restores_the_spec(observation_space, action_space):
    spec = PolicySpec.from_spaces(observation_space, action_space)
    text = json.dumps(spec.to_dict(), allow_nan=False)
    assert PolicySpec.from_dict(json.loads(text)) == spec


@settings(max_examples=150, deadline=None)
@given(box_actions(), st.data())
def test_continuous_actions_are_inside_the_space_whatever_the_graph_says(space, data):
    spec = PolicySpec.from_spaces(VECTOR, space)
    raw = data.draw(
        hnp.arrays(np.float32, (2, *space.shape), elements=st.floats(-1e4, 1e4, width=32))
    )
    for action in spec.to_environment(raw):
        assert action.dtype == space.dtype
        assert space.contains(np.asarray(action))


@settings(max_examples=150, deadline=None)
@given(ACTION_SPACES, st.integers(0, 2**32 - 1))
def test_actions_of_every_kind_get_the_spaces_dtype_and_are_inside_it(space, seed):
    spec = PolicySpec.from_spaces(VECTOR, space)
    action, rng = spec.action, np.random.default_rng(seed)
    if action.kind == "continuous":
        graph_output = (100 * rng.standard_normal((4, *action.shape))).astype(np.float32)
    else:  # raw choices plus their starts, int32 as graphs give them
        sizes, starts = action.sizes or (2,) * action.size, action.starts or (0,)
        raw = rng.integers(sizes, size=(4, action.size)) + np.array(starts)
        graph_output = raw.reshape(4, *action.shape).astype(np.int32)
    for chosen in spec.to_environment(graph_output):
        assert chosen.dtype == space.dtype
        assert space.contains(chosen if action.kind == "discrete" else np.asarray(chosen))


def test_a_float64_bound_between_two_float32_values_is_respected():
    space = spaces.Box(-0.1, 0.1, (1,), np.float64)
    spec = PolicySpec.from_spaces(VECTOR, space)
    raw = np.array([[0.1], [-0.1]], np.float32)  # float32(0.1) > 0.1
    assert float(raw[0, 0]) > 0.1
    for action in spec.to_environment(raw):
        assert space.contains(action)


@settings(max_examples=100, deadline=None)
@given(OBSERVATION_SPACES)
def test_cast_keeps_values_and_gives_contiguous_graph_dtypes(space):
    spec = PolicySpec.from_spaces(space, DISCRETE)
    space.seed(0)
    observation = space.sample()
    cast = spec.cast(spec.as_tuple(observation))
    for description, array in zip(spec.observations, cast):
        original = observation[description.name] if spec.dict_observation else observation
        assert array.dtype == description.dtype
        assert array.flags["C_CONTIGUOUS"]
        np.testing.assert_allclose(array.reshape(original.shape), original)


def test_wrong_dict_observations_are_refused():
    spec = PolicySpec.from_spaces(spaces.Dict({"a": VECTOR, "b": VECTOR}), DISCRETE)
    with pytest.raises(PolicyError, match="'c'"):
        spec.as_tuple({"a": np.zeros(3), "c": np.zeros(3)})
    with pytest.raises(PolicyError, match="ndarray"):
        spec.as_tuple(np.zeros(3))


@pytest.mark.parametrize(
    ("space", "kind", "law"),
    [
        (spaces.Discrete(4), "gumbel", stats.gumbel_r),
        (spaces.MultiDiscrete([2, 3]), "gumbel", stats.gumbel_r),
        (spaces.MultiBinary(4), "logistic", stats.logistic),
        (spaces.Box(-1, 1, (4,)), "normal", stats.norm),
    ],
)
def test_noise_follows_its_law(space, kind, law):
    spec = PolicySpec.from_spaces(VECTOR, space)
    assert spec.action.noise_kind == kind
    noise = spec.draw_noise(np.random.default_rng(3), (500, 10))
    assert noise.shape == (500, 10, spec.action.noise_size)
    assert noise.dtype == np.float32
    flat = noise.reshape(-1)
    assert stats.kstest(flat, law.cdf).pvalue > 0.01
    assert abs(flat.mean() - law.mean()) < 5 * law.std() / np.sqrt(flat.size)
    assert abs(flat.std() / law.std() - 1) < 0.05
    again = spec.draw_noise(np.random.default_rng(3), (500, 10))
    np.testing.assert_array_equal(noise, again)


class _ExtremeGenerator:
    """Gives the most extreme values a generator may."""

    def __init__(self, value):
        self.value = np.float32(value)

    def standard_exponential(self, shape, dtype):
        return np.full(shape, self.value, dtype)

    def random(self, shape, dtype):
        return np.full(shape, self.value, dtype)


@pytest.mark.parametrize("value", [0.0, np.nextafter(np.float32(1), np.float32(0))])
@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.MultiBinary(4)])
def test_noise_is_always_finite(space, value):
    spec = PolicySpec.from_spaces(VECTOR, space)
    assert np.isfinite(spec.draw_noise(_ExtremeGenerator(value), (2,))).all()


def test_zero_noise_has_the_shape_of_noise():
    spec = PolicySpec.from_spaces(VECTOR, spaces.MultiDiscrete([3, 4]))
    zero = spec.zero_noise((5,))
    assert zero.shape == (5, 7)
    assert zero.dtype == np.float32
    assert not zero.any()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0"])
def test_spaces_of_gymnasium_environments_are_supported(env_id):
    env = gym.make(env_id)
    spec = PolicySpec.from_spaces(env.observation_space, env.action_space)
    env.close()
    assert spec.observations[0].shape == env.observation_space.shape
    assert spec.action.shape == env.action_space.shape
