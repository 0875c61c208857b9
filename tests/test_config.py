"""Configuration: types, bounds, precedence, files, command line, error texts."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.config import (
    ConfigError,
    Field,
    PolicyConfig,
    RewardConfig,
    Section,
    TrainConfig,
    build_parser,
    config_from_args,
    find_tuned,
    load_config,
    resolve_config,
)

ROOT = Path(__file__).resolve().parents[1]


class PPOConfig(Section):
    """Stand-in for the section of an algorithm."""

    n_steps: int = Field(2048, ge=1)
    """Steps of each environment in an iteration."""
    batch_size: int = Field(64, ge=1)
    """Rows of a minibatch."""
    n_epochs: int = Field(10, ge=1)
    """Passes over the data of an iteration."""
    learning_rate: float = Field(3e-4, gt=0)
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear"] = Field("constant")
    """How the step size
    changes over the run."""
    clip_range: float = Field(0.2, gt=0)
    """Half-width of the trust interval of the ratio pi/pi_old."""
    clip_range_schedule: str = Field("constant", choices=("constant", "linear"))
    """How the trust interval changes over the run."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Decay of the advantage trace."""
    ent_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    target_kl: float | None = Field(None, gt=0)
    """Divergence that stops an iteration early."""


class SACConfig(Section):
    """Another stand-in."""

    tau: float = Field(0.005, gt=0, le=1)
    """Rate of the target networks."""


class Everything(Section):
    flag: bool = False
    count: int = Field(0, lt=10)
    ratio: float = 0.5
    anything: float = Field(0.0, finite=False)
    name: str = "x"
    limit: Optional[int] = None  # noqa: UP045 (both spellings are supported)
    sizes: tuple[int, ...] = Field((1, 2), ge=1)
    rates: list[float] = Field(default_factory=list)
    mode: Literal["on", "off"] = "on"
    free: dict[str, Any] = Field(default_factory=dict)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)


SECTIONS = {"ppo": PPOConfig, "sac": SACConfig}


def resolve(algo: Any = "ppo", env: Any = "Some-v0", **values: Any) -> Any:
    return resolve_config(algo, env, algorithm_sections=SECTIONS, **values)


def command_line(*words: str) -> Any:
    args = build_parser("msrl-train", SECTIONS).parse_args(words)
    return config_from_args(args, algorithm_sections=SECTIONS)


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as info:
        function(*args, **kwargs)
    text = str(info.value)
    assert text and "\n" not in text
    return text


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# Types and bounds


@pytest.mark.parametrize(
    ("field", "raw", "value"),
    [
        ("flag", True, True),
        ("count", 3, 3),
        ("count", 3.0, 3),
        ("count", "-1e5", -100000),
        ("ratio", 1, 1.0),
        ("ratio", "1e-3", 1e-3),
        ("ratio", "1E5", 1e5),
        ("anything", math.inf, math.inf),
        ("name", Path("a"), "a"),
        ("limit", None, None),
        ("limit", 7, 7),
        ("sizes", [4, 5.0], (4, 5)),
        ("sizes", (), ()),
        ("rates", (1, "1e-1"), [1.0, 0.1]),
        ("mode", "off", "off"),
        ("free", {"a": (1, {"b": None})}, {"a": [1, {"b": None}]}),
        ("policy", {"activation": "relu"}, PolicyConfig(activation="relu")),
    ],
)
def test_accepted_values_become_the_declared_type(field: str, raw: Any, value: Any) -> None:
    result = getattr(Everything(**{field: raw}), field)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("field", "raw", "text"),
    [
        ("flag", 1, "flag = 1: expected true or false"),
        ("flag", "yes", "flag = 'yes': expected true or false"),
        ("count", True, "count = True: expected an integer"),
        ("count", 1.5, "count = 1.5: expected an integer"),
        ("count", "4", "count = '4': expected an integer"),
        ("count", math.inf, "count = inf: expected an integer"),
        ("count", None, "count = None: expected an integer"),
        ("count", 10, "count = 10: must be < 10"),
        ("ratio", False, "ratio = False: expected a number"),
        ("ratio", "fast", "ratio = 'fast': expected a number"),
        ("ratio", math.nan, "ratio = nan: must be finite"),
        ("ratio", "1e999", "ratio = '1e999': must be finite"),
        ("ratio", 10**400, "expected a number that fits"),
        ("name", 3, "name = 3: expected text"),
        ("limit", "no", "limit = 'no': expected an integer, or null"),
        ("sizes", [1, 0], "sizes = [1, 0]: each item must be >= 1"),
        ("sizes", 64, "sizes = 64: expected a list of integers"),
        ("sizes", "64", "sizes = '64': expected a list of integers"),
        ("mode", "of", "mode = 'of': expected one of on, off; did you mean off?"),
        ("mode", True, "mode = True: expected one of on, off"),
        ("free", [1], "free = [1]: expected a mapping with text keys"),
        ("free", {1: 2}, "free = {1: 2}: expected a mapping with text keys"),
        ("free", {"a": object}, "values cannot be saved"),
        ("policy", 3, "policy = 3: expected a section with hidden_sizes"),
        ("kount", 3, "unknown key kount = 3: did you mean count?"),
    ],
)
def test_refused_values_name_key_value_and_expectation(field: str, raw: Any, text: str) -> None:
    assert text in error_of(Everything, **{field: raw})


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        ({"gt": 1}, 1.5, 1),
        ({"ge": 1}, 1, 0.5),
        ({"lt": 1}, 0.5, 1),
        ({"le": 1}, 1, 1.5),
        ({"gt": 0, "le": 1}, 1, math.nan),
    ],
)
def test_bounds_include_and_exclude_their_ends(rule: Any, inside: Any, outside: Any) -> None:
    body = {"__annotations__": {"x": float}, "x": Field(inside, finite=False, **rule)}
    bounded = type("Bounded", (Section,), {**body, "__module__": __name__})
    assert bounded(x=inside).x == inside
    assert "must be" in error_of(bounded, x=outside)


def test_sections_are_values() -> None:
    section = PPOConfig(n_steps=4)
    assert section == PPOConfig(n_steps=4) != PPOConfig()
    assert section.replace(gamma=1) == PPOConfig(n_steps=4, gamma=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.n_steps = 5  # type: ignore[misc]
    assert "gamma = 2" in error_of(section.replace, gamma=2)


def test_defaults_are_not_shared_between_instances() -> None:
    one, other = Everything(), Everything()
    one.free["a"] = 1
    assert other.free == {}


# Python


def test_python_accepts_nested_dicts_sections_and_dotted_keys() -> None:
    config = resolve(
        n_envs=4,
        ppo={"n_steps": 8},
        reward=RewardConfig(normalize=True),
        overrides={"ppo": {"gamma": 0.5}, "env_kwargs.a.b": 1, "env_kwargs": {"c.d": 2}},
        **{"ppo.learning_rate": 1e-3, "policy.hidden_sizes": [8]},
    )
    assert isinstance(config, TrainConfig)
    assert (config.algo, config.env, config.n_envs) == ("ppo", "Some-v0", 4)
    assert config.ppo == PPOConfig(n_steps=8, learning_rate=1e-3, gamma=0.5)
    assert config.algorithm is config.ppo
    assert config.policy.hidden_sizes == (8,)
    assert config.reward.normalize
    assert config.env_kwargs == {"a": {"b": 1}, "c.d": 2}


def test_the_section_is_that_of_the_algorithm() -> None:
    assert resolve("sac").algorithm == SACConfig()
    assert not hasattr(resolve("sac"), "ppo")


def test_replace_copy_and_pickle_keep_an_equal_config() -> None:
    config = resolve(n_envs=3)
    assert config.replace(n_envs=4) == resolve(n_envs=4)
    assert copy.deepcopy(config) == config
    again = pickle.loads(pickle.dumps(config))  # as a worker process receives it
    assert again == config
    assert again.sources == config.sources


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"learning_rate": 1.0},
            "unknown key learning_rate = 1.0: did you mean ppo.learning_rate?",
        ),
        ({"policy.seed": 1}, "unknown key policy.seed = 1: did you mean seed?"),
        (
            {"ppo.learing_rate": 1},
            "unknown key ppo.learing_rate = 1: did you mean ppo.learning_rate",
        ),
        ({"ppo": {"gama": 1}}, "unknown key ppo.gama = 1: did you mean ppo.gamma?"),
        ({"ppo.clip": 1}, "or reward.clip?"),
        ({"pop": {"x": 1}}, "unknown key pop.x = 1: did you mean ppo?"),
        ({"polcy.activation": "relu"}, "did you mean policy.activation?"),
        ({"total_step": 5}, "did you mean total_steps?"),
        ({"ppo.zzzz": 1}, "valid keys: ppo.n_steps, ppo.batch_size"),
        ({"sac.tau": 1}, "sac.tau: it belongs to the algorithm sac, and algo is ppo"),
        ({"ppo": 3}, "ppo = 3: expected a section with keys n_steps"),
        ({"ppo.gamma.x": 3}, "ppo.gamma = {'x': 3}: expected a number"),
        ({"ppo.gamma": 1.5}, "ppo.gamma = 1.5: must be >= 0 and <= 1"),
        ({"ppo.gamma": 1, "ppo": {"gamma": 1}}, "ppo.gamma = 1: the key is given twice"),
        ({"n_envs": "x" * 500}, "xxx...: expected an integer"),
        ({"n_envs": "a\nb"}, "expected an integer"),
    ],
)
def test_wrong_keys_and_values_are_one_line(values: Any, text: str) -> None:
    assert text in error_of(resolve, **values)


def test_unknown_algorithm_lists_the_known_ones() -> None:
    assert "known: ppo, sac; did you mean ppo?" in error_of(resolve, "poo")
    assert "known: ppo, sac; did you mean sac?" in error_of(resolve, "SAC")
    assert "known: ppo, sac" in error_of(resolve, ["ppo"])
    assert error_of(resolve, None) == "algo is required: give --algo NAME, one of ppo, sac"
    assert "env is required: give --env" in error_of(resolve, "ppo", None)


# Precedence and tuned files


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "algo: sac\nenv: CartPole-v1\nseed: 1\nn_envs: 2\nenv_kwargs: {a: 1, b: 1}\n"
        "ppo: {n_steps: 3, gamma: 0.1, ent_coef: 0.1}\npolicy:\n",
    )
    config = command_line(
        "--set", "ppo.gamma=0.3", "--set", "env_kwargs.b=2", "--set", "ppo.gamma=0.4",
        "--n-envs", "5", "--algo", "ppo", "--config", str(file), "--set", "seed=9",
    )  # fmt: skip
    assert (config.algo, config.seed, config.n_envs) == ("ppo", 9, 5)
    assert config.ppo == PPOConfig(n_steps=3, gamma=0.4, ent_coef=0.1)
    assert config.env_kwargs == {"a": 1, "b": 2}
    assert config.sources == {
        "algo": "--algo",
        "env": str(file),
        "seed": "--set",
        "n_envs": "--n-envs",
        "env_kwargs": "--set",
        "ppo.n_steps": str(file),
        "ppo.gamma": "--set",
        "ppo.ent_coef": str(file),
    }


def test_set_wins_over_a_flag_whatever_their_order() -> None:
    words = ["--algo", "ppo", "--env", "X-v0"]
    assert command_line(*words, "--set", "n_envs=2", "--n-envs", "3").n_envs == 2


def test_tuned_configuration_is_used_unless_refused(tmp_path: Path) -> None:
    words = ["--algo", "ppo", "--env", "CartPole-v1"]
    shipped = yaml.safe_load((ROOT / "configs" / "ppo" / "CartPole-v1.yaml").read_text())
    tuned = command_line(*words, "--set", "ppo.gamma=0.9")
    assert (tuned.n_envs, tuned.total_steps) == (shipped["n_envs"], shipped["total_steps"])
    assert tuned.ppo == PPOConfig(**{**shipped["ppo"], "gamma": 0.9})
    assert tuned.sources["n_envs"] == "configs/ppo/CartPole-v1.yaml"
    assert command_line(*words, "--no-tuned").ppo == PPOConfig()
    assert resolve("ppo", "CartPole-v1", tuned=False).ppo == PPOConfig()
    assert resolve("ppo", "CartPole-v1").ppo.n_steps == shipped["ppo"]["n_steps"]
    empty = write(tmp_path / "empty.yaml", "")
    assert command_line(*words, "--config", str(empty)).ppo == PPOConfig()
    assert command_line("--algo", "sac", "--env", "CartPole-v1").n_envs == 1


def test_find_tuned() -> None:
    path = find_tuned("ppo", "CartPole-v1")
    assert path is not None
    assert path.parts[-2:] == ("ppo", "CartPole-v1.yaml")
    assert find_tuned("ppo", "Nothing-v0") is None
    assert find_tuned("ppo", "../ppo/CartPole-v1") is None
    assert find_tuned("ppo", "module:Some/Env-v1") is None


# Files


def test_saved_config_alone_gives_an_equal_object(tmp_path: Path) -> None:
    config = resolve(
        "ppo", "CartPole-v1", seed=3, run_dir="1e-3", env_kwargs={"a": "yes", "b": [1, {"c": None}]}
    )
    path = tmp_path / "config.yaml"
    config.save(path)
    assert load_config(path, SECTIONS) == config
    assert command_line("--config", str(path)) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]  # no temporary file stays


def test_saved_config_is_complete_readable_and_says_where_values_came_from(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    resolve("ppo", "CartPole-v1", seed=3).save(path)
    text = path.read_text()
    assert "# Set by configs/ppo/CartPole-v1.yaml: total_steps, n_envs" in text
    assert "\npolicy:\n  hidden_sizes: [64, 64]\n  activation: tanh\n" in text
    tree = yaml.safe_load(text)  # any reader understands it
    assert tree["ppo"]["learning_rate"] == resolve("ppo", "CartPole-v1").ppo.learning_rate
    assert list(tree) == [field.name for field in dataclasses.fields(resolve())]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    assert "cannot write" in error_of(resolve().save, tmp_path / "missing" / "c.yaml")
    (tmp_path / "folder").mkdir()
    assert "cannot write" in error_of(resolve().save, tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_saved_file_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_config as t;"
        "print(t.resolve('ppo', 'CartPole-v1', env_kwargs={'b': 1, 'a': 2}).to_yaml());"
        "assert 'mindspore' not in sys.modules"
    )
    root = Path(__file__).parents[1]
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1.e5", 1e5), ("010", 10), ("1_000", 1000), ("on", "on"), ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"), ("null", None), ("", None), ("~", None), ("-3", -3),
        ("true", True), (".inf", math.inf), ("[a, {b: 1}]", ["a", {"b": 1}]), ("'7'", "7"),
    ],
)  # fmt: skip
def test_yaml_scalars_read_as_they_look(text: str, value: Any) -> None:
    config = command_line("--algo", "ppo", "--env", "X-v0", "--set", f"env_kwargs.x={text}")
    assert config.env_kwargs == {"x": value}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a: 1\nseed: [1\n", "bad.yaml, line 3: "),
        (b"a: 1\n\tb: 2\n", "bad.yaml, line 2: "),
        (b"seed: 1\nseed: 2\n", "bad.yaml, line 2: the key seed is given twice"),
        (b"ppo:\n  gamma: 1\n  gamma: 1\n", "bad.yaml, line 3: the key gamma is given twice"),
        (b"seed: 1\nenv: \xff\n", "bad.yaml, line 2: not UTF-8 text"),
        (b"seed: 1\nenv: \x00\n", "bad.yaml, line 2: "),
        (b"- 1\n", "line 1: expected lines of the form key: value"),
        (b"x: !!python/object/apply:os.getcwd []\n", "bad.yaml, line 1: "),
        (b"env_kwargs: &a {b: *a}\n", "bad.yaml, line 1: "),
        (b"? [1]\n: 2\n", "bad.yaml, line 1: "),
        (b"seed: 1\n1: 2\n", "unknown key 1 = 2"),
    ],
)
def test_unusable_yaml_names_file_and_line(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(data)
    assert text in error_of(resolve, config_file=path)


def test_missing_file_and_wrong_value_name_the_file(tmp_path: Path) -> None:
    assert "nowhere.yaml: No such file" in error_of(load_config, tmp_path / "nowhere.yaml")
    path = write(tmp_path / "a.yaml", "algo: ppo\nenv: X-v0\nn_envs: 0\n")
    assert error_of(load_config, path, SECTIONS) == f"n_envs = 0: must be >= 1 (given by {path})"


FINITE = st.floats(allow_nan=False, allow_infinity=False)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
LOOKALIKES = st.sampled_from(
    ["1e-3", "yes", "null", "~", "010", "0x1F", "1:30", "2024-01-01", "<<", "=", ".inf", "- a", "#"]
)


@settings(max_examples=150, deadline=None)
@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "env": st.text() | LOOKALIKES,
            "total_steps": st.integers(1, 10**15),
            "seed": st.integers(0, 2**32 - 1),
            "run_dir": st.none() | st.text() | LOOKALIKES,
            "env_kwargs": st.dictionaries(st.text() | LOOKALIKES, FREE | LOOKALIKES, max_size=4),
            "quiet": st.booleans(),
            "vectorization": st.sampled_from(["auto", "sync", "async", "batched", "envpool"]),
            "policy.hidden_sizes": st.lists(st.integers(1, 4096), max_size=4),
            "policy.log_std_init": FINITE,
            "ppo.learning_rate": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
            "ppo.target_kl": st.none() | st.floats(1e-9, 1e9),
        },
    )
)
def test_any_valid_config_survives_a_file(values: Any, tmp_path_factory: Any) -> None:
    config = resolve(**values)
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    config.save(path)
    assert load_config(path, SECTIONS) == config
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == config.to_dict()


# Command line


def test_flags_reach_their_fields() -> None:
    config = command_line(
        "--algo", "ppo", "--env", "123", "--total-steps", "1e5", "--seed", "7", "--n-envs=2",
        "--run-dir", "1e3", "--quiet",
    )  # fmt: skip
    assert (config.env, config.total_steps, config.seed) == ("123", 100_000, 7)
    assert (config.n_envs, config.run_dir, config.quiet) == (2, "1e3", True)


def test_resume_starts_from_the_file_of_the_run(tmp_path: Path) -> None:
    resolve(n_envs=3, total_steps=10).save(tmp_path / "config.yaml")
    words = ["--resume", str(tmp_path), "--total-steps", "20"]
    args = build_parser("x", SECTIONS).parse_args(words)
    assert args.resume == str(tmp_path)
    config = config_from_args(
        args, config_file=tmp_path / "config.yaml", algorithm_sections=SECTIONS
    )
    assert config == resolve(n_envs=3, total_steps=20)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--n-envs 0", "n_envs = 0: must be >= 1 (given by --n-envs)"),
        ("--total-steps abc", "total_steps = 'abc': expected an integer (given by --total-steps)"),
        ("--total-steps 0", "total_steps = 0: must be > 0 (given by --total-steps)"),
        ("--seed -1", "seed = -1: must be >= 0"),
        ("--n-envs [", "n_envs = '[' is not a YAML value"),
        ("--n-envs", "argument --n-envs: expected one argument"),
        ("--total-step 5", "unknown argument --total-step; did you mean --total-steps?"),
        ("--learning-rate 1", "unknown argument --learning-rate; did you mean --set ppo.learning_"),
        ("stray", "unknown argument stray"),
        ("--config a --resume b", "not allowed with"),
        ("--set ppo.gamma", "--set ppo.gamma: expected KEY=VALUE, for example"),
        ("--set =1", "--set =1: expected KEY=VALUE"),
        ("--set learning_rate=1", "did you mean ppo.learning_rate? (given by --set)"),
        ("--set ppo.gamma=[1", "ppo.gamma = '[1' is not a YAML value"),
        ("--set ppo.gamma=x", "ppo.gamma = 'x': expected a number (given by --set)"),
        ("--set ppo.clip_range_schedule=lin", "expected one of constant, linear"),
    ],
)
def test_command_line_mistakes_are_one_line(words: str, text: str) -> None:
    assert text in error_of(command_line, "--algo", "ppo", "--env", "X-v0", *words.split())


def help_text(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit) as info:
        build_parser("msrl-train", SECTIONS).parse_args([*words, "--help"])
    assert info.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_every_key_with_default_bounds_and_meaning(capsys: Any) -> None:
    text = help_text(capsys)
    assert "ppo.clip_range: a number, > 0; default 0.2 Half-width of the trust interval" in text
    assert "How the step size changes over the run." in text
    assert "policy.hidden_sizes: a list of integers, >= 1; default [64, 64] Widths" in text
    assert "ppo.target_kl: a number or null, > 0; default null" in text
    assert "sac.tau: a number, > 0, <= 1; default 0.005" in text
    assert "env: text; required" in text
    assert "policy.activation: one of tanh, relu; default tanh" in text


def test_help_of_one_algorithm_leaves_out_the_others(capsys: Any) -> None:
    for words in (["--algo", "ppo"], ["--algo=ppo"]):
        text = help_text(capsys, *words)
        assert "ppo.clip_range" in text
        assert "sac.tau" not in text


def test_every_field_of_the_library_has_its_docstring() -> None:
    from msrl_accel.config_schema import fields_of

    sections = [TrainConfig, *filter(None, (f.section for f in fields_of(TrainConfig).values()))]
    for section in sections:
        for name, spec in fields_of(section).items():
            assert spec.section or spec.doc, f"{section.__name__}.{name}"
