"""Gymnasium spaces described for a policy graph: names, order, shapes, dtypes and bounds.

Nothing here needs MindSpore: a deployed policy reads the same description from its manifest. Only
`PolicySpec.from_spaces` needs Gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel.errors import PolicyError, SpaceError

if TYPE_CHECKING:
    import gymnasium as gym

Observations = tuple[np.ndarray, ...]

BOX_NAME = "observation"
"""Name of the only tensor of a Box observation."""

SUPPORTED_OBSERVATIONS = "Box, or a one-level Dict of Box"
SUPPORTED_ACTIONS = "Discrete, MultiDiscrete, MultiBinary, or a floating-point Box"


@dataclass(frozen=True)
class ObservationSpec:
    """One observation tensor, without its batch dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """'uint8' for images, which stay uint8 until the graph, otherwise 'float32'."""
    low: tuple[float, ...] = (-np.inf,)
    """Lower bound of each component, or one number for all; -inf where there is none."""
    high: tuple[float, ...] = (np.inf,)

    @property
    def is_image(self) -> bool:
        """Whether a convolutional torso reads it: uint8 with two spatial axes of at least 8."""
        return self.dtype == "uint8" and len(self.shape) in (2, 3) and min(self.hwc[:2]) >= 8

    @property
    def channels_first(self) -> bool:
        """Whether the smallest outer axis of a three-dimensional image comes first."""
        return len(self.shape) == 3 and self.shape[0] < self.shape[2]

    @property
    def hwc(self) -> tuple[int, int, int]:
        """Height, width and channels of an image of either layout."""
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1], 1
        if self.channels_first:
            return self.shape[1], self.shape[2], self.shape[0]
        return self.shape[0], self.shape[1], self.shape[2]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest value of each component, float64, of the observation's shape."""
        low, high = (
            np.broadcast_to(np.array(b) if len(b) == 1 else np.reshape(b, self.shape), self.shape)
            for b in (self.low, self.high)
        )
        return low, high


@dataclass(frozen=True)
class ActionSpec:
    """The action an environment takes, and how the policy's distribution makes it."""

    kind: str
    """'discrete', 'multi_discrete', 'multi_binary' or 'continuous'."""
    shape: tuple[int, ...]
    """Shape of one action in the environment; () for Discrete."""
    dtype: str
    """NumPy dtype of the environment's action."""
    sizes: tuple[int, ...] = ()
    """Number of choices of each component (discrete kinds)."""
    starts: tuple[int, ...] = ()
    """Smallest value of each component (discrete kinds)."""
    low: tuple[float, ...] = ()
    """Lower bound of each component (continuous); -inf where there is none."""
    high: tuple[float, ...] = ()
    squashed: bool = False
    """Whether the distribution draws in [-1, 1], which the bounds are mapped from (continuous)."""

    @property
    def size(self) -> int:
        """Number of components of one action."""
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest value of each component, of the action's shape and dtype."""
        low, high = (np.array(b, self.dtype).reshape(self.shape) for b in (self.low, self.high))
        return low, high

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of the action as the distribution draws it, before environment units."""
        return () if self.kind == "discrete" else (self.size,)

    @property
    def raw_dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int32"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """What the distribution's parameters are called in exported graphs and reports."""
        return ("mean", "log_std") if self.kind == "continuous" else ("logits",)

    @property
    def noise_kind(self) -> str:
        """Law of the noise the graph takes; zeros of the same shape make it deterministic."""
        return {
            "discrete": "gumbel",
            "multi_discrete": "gumbel",
            "multi_binary": "logistic",
            "continuous": "normal",
        }[self.kind]

    @cached_property
    def noise_size(self) -> int:
        return sum(self.sizes) if self.noise_kind == "gumbel" else self.size


@dataclass(frozen=True)
class PolicySpec:
    """Everything a policy graph must know of its environment."""

    observations: tuple[ObservationSpec, ...]
    action: ActionSpec
    dict_observation: bool
    has_value: bool = True
    """Whether the graph also returns the value of the state, or of the action in it."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Outputs of the graph, in order."""
        value = ("value",) if self.has_value else ()
        return ("action", "log_prob", *value, "raw_action", *self.action.parameter_names)

    @classmethod
    def from_spaces(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> PolicySpec:
        """Describe a pair of Gymnasium spaces.

        Raises:
            SpaceError: the space is not supported; the message says which are.
        """
        import gymnasium as gym

        is_dict = isinstance(observation_space, gym.spaces.Dict)
        return cls(_observation_specs(observation_space), _action_spec(action_space), is_dict)

    def as_tuple(self, observation: Any) -> Observations:
        """Observation as the environment gives it (array, dict of arrays) -> tuple in graph order.

        Raises:
            PolicyError: an entry is missing or unknown.
        """
        if not self.dict_observation:
            return (np.asarray(observation),)
        if not isinstance(observation, Mapping):
            raise PolicyError(
                f"observation is {type(observation).__name__}, "
                f"this policy takes a dict with keys {[o.name for o in self.observations]}"
            )
        names = {o.name for o in self.observations}
        if set(observation) != names:
            raise PolicyError(
                f"observation has keys {sorted(observation)}, this policy takes {sorted(names)}"
            )
        return tuple(np.asarray(observation[o.name]) for o in self.observations)

    def cast(self, observations: Observations) -> Observations:
        """Cast to the graph's dtypes and make C-contiguous; copies only where it must."""
        return tuple(
            np.ascontiguousarray(x, dtype=spec.dtype)
            for x, spec in zip(observations, self.observations)
        )

    def to_environment(self, actions: np.ndarray) -> np.ndarray:
        """Actions [N, ...] as the graph returns them, in the environment's dtype.

        A float64 bound may lie between two float32 values: the cast is clipped once more.
        """
        action = self.action
        if action.kind != "continuous":
            return actions.astype(action.dtype)
        low, high = action.bounds
        clipped: np.ndarray = np.minimum(np.maximum(actions.astype(action.dtype), low), high)
        return clipped

    def draw_noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Noise [*shape, noise_size] float32 of the law in `action.noise_kind`."""
        full = (*shape, self.action.noise_size)
        kind = self.action.noise_kind
        if kind == "normal":
            return rng.standard_normal(full, dtype=np.float32)
        if kind == "gumbel":
            exponential = rng.standard_exponential(full, dtype=np.float32)
            noise: np.ndarray = -np.log(np.maximum(exponential, np.float32(1e-20)))
            return noise
        uniform = np.clip(rng.random(full, dtype=np.float32), 1e-7, 1 - 1e-7)
        return (np.log(uniform) - np.log1p(-uniform)).astype(np.float32)

    def random_actions(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Uniform actions of a bounded space: raw as a distribution draws them, and as acted.

        Returns:
            raw [n, *raw_shape] (continuous: in [-1, 1]), and the same in environment units
            [n, *shape].
        """
        a = self.action
        if a.kind == "continuous":
            raw = rng.uniform(-1.0, 1.0, (n, a.size)).astype(np.float32)
            low, high = (b.reshape(-1).astype(np.float64) for b in a.bounds)
            return raw, (low + (raw + 1.0) * 0.5 * (high - low)).reshape((n, *a.shape))
        sizes = (2,) * a.size if a.kind == "multi_binary" else a.sizes
        raw = rng.integers(0, sizes, (n, len(sizes)), np.int32)
        actions = (raw + np.array(a.starts or 0, np.int32)).reshape((n, *a.shape))
        return raw.reshape((n, *a.raw_shape)), actions

    def zero_noise(self, shape: tuple[int, ...]) -> np.ndarray:
        """The noise of the deterministic policy."""
        return np.zeros((*shape, self.action.noise_size), np.float32)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; `from_dict` is its inverse."""
        return {
            "observations": [_fields(o) for o in self.observations],
            "dict_observation": self.dict_observation,
            "has_value": self.has_value,
            "action": _fields(self.action),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicySpec:
        observations = tuple(
            ObservationSpec(
                o["name"],
                tuple(o["shape"]),
                o["dtype"],
                _bounds(o.get("low", [None]), -np.inf),
                _bounds(o.get("high", [None]), np.inf),
            )
            for o in data["observations"]
        )
        a = data["action"]
        action = ActionSpec(
            kind=a["kind"],
            shape=tuple(a["shape"]),
            dtype=a["dtype"],
            sizes=tuple(a["sizes"]),
            starts=tuple(a["starts"]),
            low=_bounds(a["low"], -np.inf),
            high=_bounds(a["high"], np.inf),
            squashed=bool(a.get("squashed", False)),
        )
        has_value = bool(data.get("has_value", True))
        return cls(observations, action, bool(data["dict_observation"]), has_value)


def _fields(spec: ObservationSpec | ActionSpec) -> dict[str, Any]:
    """Fields as JSON has them: lists for tuples, and null for an open bound."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    for name in ("low", "high"):
        values[name] = [None if np.isinf(x) else x for x in values[name]]
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _bounds(values: Sequence[float | None], missing: float) -> tuple[float, ...]:
    return tuple(missing if x is None else float(x) for x in values)


def _observation_specs(space: gym.Space[Any]) -> tuple[ObservationSpec, ...]:
    import gymnasium as gym

    if isinstance(space, gym.spaces.Dict):
        if not space.spaces:
            raise SpaceError("observation space Dict() is empty; give it at least one Box entry")
        # Sorted, so that the order never depends on insertion or on the hash seed.
        return tuple(_box_spec(key, space.spaces[key]) for key in sorted(space.spaces))
    return (_box_spec(BOX_NAME, space),)


def _box_spec(name: str, space: gym.Space[Any]) -> ObservationSpec:
    import gymnasium as gym

    if not isinstance(space, gym.spaces.Box):
        where = "" if name == BOX_NAME else f" (key {name!r})"
        remedy = "wrap the environment in gymnasium.wrappers.FlattenObservation"
        raise SpaceError(
            f"observation space {space}{where} is not supported: "
            f"use {SUPPORTED_OBSERVATIONS}, or {remedy}"
        )
    if space.dtype.kind not in "fiub":
        raise SpaceError(f"observation {name!r} has dtype {space.dtype}: use a real-valued dtype")
    is_image = space.dtype == np.uint8 and len(space.shape) in (2, 3)
    dtype = "uint8" if is_image else "float32"
    low, high = (_one_for_all(bound) for bound in (space.low, space.high))
    return ObservationSpec(name, tuple(space.shape), dtype, low, high)


def _one_for_all(bound: np.ndarray) -> tuple[float, ...]:
    """Bounds of all components, or the one that they share."""
    values = tuple(float(x) for x in np.ravel(bound))
    return values[:1] if len(set(values)) == 1 else values


def _action_spec(space: gym.Space[Any]) -> ActionSpec:
    import gymnasium as gym

    if isinstance(space, gym.spaces.Discrete):
        return ActionSpec("discrete", (), space.dtype.name, (int(space.n),), (int(space.start),))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return ActionSpec(
            "multi_discrete",
            tuple(space.shape),
            space.dtype.name,
            tuple(int(n) for n in np.ravel(space.nvec)),
            tuple(int(s) for s in np.ravel(space.start)),
        )
    if isinstance(space, gym.spaces.MultiBinary):
        return ActionSpec("multi_binary", tuple(space.shape), space.dtype.name)
    if isinstance(space, gym.spaces.Box) and space.dtype.kind == "f":
        low, high = (tuple(float(x) for x in np.ravel(b)) for b in (space.low, space.high))
        return ActionSpec("continuous", tuple(space.shape), space.dtype.name, low=low, high=high)
    raise SpaceError(f"action space {space} is not supported: use {SUPPORTED_ACTIONS}")
