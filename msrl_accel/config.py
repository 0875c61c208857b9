"""Configuration of a run: from YAML files, command line and Python to one checked `TrainConfig`.

Later wins: defaults, the tuned file of the algorithm and environment (unless a file is given),
the file, named flags or arguments, ``--set KEY=VALUE``. Each mistake is one line of `ConfigError`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msrl_accel.commandline import CommandParser
from msrl_accel.config_help import help_keys
from msrl_accel.config_schema import (
    Field,
    FieldSpec,
    Section,
    fields_of,
    flatten,
    nearest_keys,
)
from msrl_accel.config_sections import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    PipelineConfig,
    PolicyConfig,
    RewardConfig,
    RuntimeConfig,
    TrainConfig,
    train_config_class,
)
from msrl_accel.config_types import bad_value
from msrl_accel.config_yaml import PathLike, parse_value, read_mapping
from msrl_accel.configs import find_tuned
from msrl_accel.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "EvaluationConfig",
    "Field",
    "LoggingConfig",
    "PipelineConfig",
    "PolicyConfig",
    "RewardConfig",
    "RuntimeConfig",
    "Section",
    "TrainConfig",
    "build_parser",
    "config_from_args",
    "find_tuned",
    "load_config",
    "resolve_config",
]

AlgorithmSections = Mapping[str, "type[Section]"]

_FLAGS = ("algo", "env", "total_steps", "seed", "n_envs", "run_dir", "quiet")
_NESTED_FLAGS = {
    "--rollout-runtime": "runtime.rollout",
    "--mode": "pipeline.mode",
    "--engine": "pipeline.engine",
    "--workers": "pipeline.workers",
    "--envs-per-worker": "pipeline.envs_per_worker",
    "--queue-size": "pipeline.queue_size",
    "--placement": "pipeline.placement",
    "--max-staleness": "pipeline.max_staleness",
    "--trace": "pipeline.trace",
}
_TEXT_FLAGS = ("algo", "env", "run_dir")  # taken as they are; the others are YAML values
_ALGORITHM = "algorithm"
"""Stands for the section of the chosen algorithm in the keys of flags."""
_ALGORITHM_FLAGS = {
    "--model": ("model", "Language model: a folder, a .gguf file, or smollm2."),
    "--parity-gate": (
        "parity_gate",
        "End the run where log-probabilities of rollout and training differ by more.",
    ),
}


class _Layer(NamedTuple):
    """Values from one source; later layers win."""

    source: str
    tree: Mapping[Any, Any]


def resolve_config(
    algo: str | None = None,
    env: str | None = None,
    *,
    config_file: PathLike | None = None,
    tuned: bool = True,
    overrides: Mapping[str, Any] | None = None,
    algorithm_sections: AlgorithmSections | None = None,
    **values: Any,
) -> TrainConfig:
    """The configuration of a run, from Python.

    Args:
        algo, env: algorithm and environment; may also come from the file.
        config_file: YAML file to start from; no tuned configuration is used then.
        tuned: whether to start from the tuned configuration of `algo` and `env`, if there is one.
        overrides: values that win over all others.
        algorithm_sections: section class of each algorithm; default those of
            `msrl_accel.algorithms`.
        **values: fields of `TrainConfig`. Here and in `overrides`, sections are nested dicts,
            `Section` objects, or dotted keys: ``**{"ppo.learning_rate": 1e-3}``.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or out of bounds.
    """
    named = {**({} if algo is None else {"algo": algo}), **({} if env is None else {"env": env})}
    layers = [_Layer("resolve_config", {**named, **values}), _Layer("overrides", overrides or {})]
    return _resolve(layers, config_file, tuned, algorithm_sections)


def load_config(path: PathLike, algorithm_sections: AlgorithmSections | None = None) -> TrainConfig:
    """The configuration in a YAML file over the defaults; reads what `TrainConfig.save` wrote.

    Raises `ConfigError` as `resolve_config` does.
    """
    return _resolve([], path, False, algorithm_sections)


def _resolve(
    layers: list[_Layer],
    config_file: PathLike | None,
    tuned: bool,
    algorithm_sections: AlgorithmSections | None,
) -> TrainConfig:
    if config_file is not None:
        layers = [_Layer(str(config_file), read_mapping(config_file)), *layers]
    algo, section = _choose_algorithm(layers, algorithm_sections)
    cls = train_config_class(algo, section)

    def flat(layer: _Layer) -> tuple[str, dict[str, Any]]:
        return layer.source, _flat(cls, layer, algo, algorithm_sections)

    given = [flat(layer) for layer in layers]
    defaults = [flat(_Layer(f"defaults of {algo}", section.run_defaults))]
    env = _last(layers, "env")
    if tuned and config_file is None and isinstance(env, str):
        model = next((x[f"{algo}.model"] for _, x in given[::-1] if f"{algo}.model" in x), None)
        path = find_tuned(algo, env, model)
        if path is not None:
            defaults.append(flat(_Layer(f"configs/{algo}/{path.name}", read_mapping(path))))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, found in [*defaults, *given]:
        for key, value in found.items():
            values[key] = _merge(values.get(key), value)
            sources[key] = source
    config: TrainConfig = _build(cls, values, sources)
    return config.with_sources(sources)


def _last(layers: list[_Layer], key: str) -> Any:
    """Value of a top-level key in the last layer that has it, or None."""
    return next((layer.tree[key] for layer in reversed(layers) if key in layer.tree), None)


def _algorithm_names(sections: AlgorithmSections | None) -> tuple[str, ...]:
    if sections is not None:
        return tuple(sections)
    names: tuple[str, ...] = importlib.import_module("msrl_accel.algorithms").names()
    return names


def _algorithm_section(name: str, sections: AlgorithmSections | None) -> type[Section]:
    """Section class of a known algorithm; imports its module only now."""
    if sections is not None:
        return sections[name]
    section: type[Section] = importlib.import_module("msrl_accel.algorithms").config_class(name)
    return section


def _choose_algorithm(
    layers: list[_Layer], sections: AlgorithmSections | None
) -> tuple[str, type[Section]]:
    algo = _last(layers, "algo")
    names = _algorithm_names(sections)
    known = ", ".join(names)
    if algo is None:
        raise ConfigError(f"algo is required: give --algo NAME, one of {known}")
    if algo not in names:
        near = difflib.get_close_matches(str(algo).lower(), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise bad_value("algo", algo, f"unknown algorithm; known: {known}{hint}")
    return algo, _algorithm_section(algo, sections)


def _flat(
    cls: type[TrainConfig], layer: _Layer, algo: str, sections: AlgorithmSections | None
) -> dict[str, Any]:
    """Values of a layer by dotted key; errors name the layer."""
    found: dict[str, Any] = {}
    if layer.source in _ALGORITHM_FLAGS:
        layer = _Layer(layer.source, {algo: layer.tree[_ALGORITHM]})
    for top in layer.tree:
        other = str(top).partition(".")[0]
        if other != algo and other in _algorithm_names(sections):
            raise ConfigError(
                f"unknown key {top}: it belongs to the algorithm {other}, and algo is {algo}"
                f" (given by {layer.source})"
            )
    try:
        for key, value in flatten(cls, layer.tree):
            both_mappings = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            if key in found and not both_mappings:
                raise bad_value(key, value, "the key is given twice")
            found[key] = _merge(found.get(key), value)
    except ConfigError as error:
        raise ConfigError(f"{error} (given by {layer.source})") from None
    return found


def _merge(old: Any, new: Any) -> Any:
    """`new`, laid over `old` key by key where both are mappings."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def _build(
    cls: type[Section], values: Mapping[str, Any], sources: Mapping[str, str], prefix: str = ""
) -> Any:
    """A section from checked values by dotted key, the rest from defaults."""
    arguments = {}
    for name, spec in fields_of(cls).items():
        key = prefix + name
        if spec.section is not None:
            arguments[name] = _build(spec.section, values, sources, f"{key}.")
        elif key in values:
            try:
                arguments[name] = spec.convert(values[key], key)
            except ConfigError as error:
                raise ConfigError(f"{error} (given by {sources[key]})") from None
    return cls(**arguments)


class _Parser(CommandParser):
    """Its help lists the keys of the chosen algorithm."""

    algorithm_sections: AlgorithmSections | None = None
    _algo: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # --help acts before later arguments are read, so the algorithm is looked for first.
        words = list(sys.argv[1:] if args is None else args)
        for word, after in zip(words, [*words[1:], None]):
            if word == "--algo" or word.startswith("--algo="):
                self._algo = after if word == "--algo" else word.partition("=")[2]
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise ConfigError(f"unknown argument {unknown[0]}{self._suggestion(unknown[0])}")
        return parsed

    def _suggestion(self, word: str) -> str:
        flag = word.partition("=")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.75)
        if near:
            return f"; did you mean {near[0]}?"
        keys = [
            key
            for name in _help_algorithms(self._algo, self.algorithm_sections)
            for key in nearest_keys(
                train_config_class(name, _algorithm_section(name, self.algorithm_sections)),
                flag.lstrip("-").replace("-", "_"),
            )
        ]
        return f"; did you mean --set {keys[0]}=VALUE?" if keys else "; see --help"

    def format_help(self) -> str:
        return super().format_help() + "\n" + _help_keys(self._algo, self.algorithm_sections)


def build_parser(
    prog: str | None = None, algorithm_sections: AlgorithmSections | None = None
) -> argparse.ArgumentParser:
    """Command line of training. Mistakes raise `ConfigError`; ``--help`` prints and exits.

    Attributes parsed besides those for `config_from_args`: ``resume`` (path or None).
    """
    parser = _Parser(prog=prog, description="Train a policy.", allow_abbrev=False)
    parser.algorithm_sections = algorithm_sections
    specs = fields_of(TrainConfig)
    for name in _FLAGS:
        option = "--" + name.replace("_", "-")
        if name == "quiet":
            parser.add_argument(option, action="store_true", default=None, help=specs[name].doc)
        else:
            # Values stay text: config_from_args checks them like those of a file.
            metavar = name.upper().replace("RUN_", "")
            parser.add_argument(option, metavar=metavar, help=specs[name].doc)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", metavar="RUN", help="Run directory to continue.")
    start.add_argument("--config", metavar="FILE", help="YAML file of the keys below.")
    for flag, key in _NESTED_FLAGS.items():
        help_text = " ".join(_field_at(key).doc.split())
        if key == "pipeline.trace":
            parser.add_argument(flag, action="store_const", const=True, help=help_text)
        else:
            metavar = key.rpartition(".")[2].upper()
            parser.add_argument(flag, metavar=metavar, help=help_text)
    for flag, (name, help_text) in _ALGORITHM_FLAGS.items():
        parser.add_argument(flag, metavar=name.upper(), help=help_text)
    parser.add_argument(
        "--no-tuned",
        dest="tuned",
        action="store_false",
        help="Leave out the tuned configuration shipped for the algorithm and environment.",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Set any key below, such as --set policy.hidden_sizes=[256,256]; repeatable.",
    )
    return parser


def config_from_args(
    args: argparse.Namespace,
    *,
    config_file: PathLike | None = None,
    algorithm_sections: AlgorithmSections | None = None,
) -> TrainConfig:
    """The configuration that arguments parsed by `build_parser` ask for.

    Args:
        args: parsed arguments.
        config_file: file to start from instead of ``args.config``; for a run to be resumed, the
            file saved with it.
        algorithm_sections: as in `resolve_config`.
    """
    layers = []
    for name in _FLAGS:
        value = getattr(args, name)
        if value is not None:
            flag = "--" + name.replace("_", "-")
            text = isinstance(value, str) and name not in _TEXT_FLAGS
            layers.append(_Layer(flag, {name: _flag_value(name, value) if text else value}))
    for flag, key in _NESTED_FLAGS.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            text = isinstance(value, str) and _field_at(key).kind is not str
            layers.append(_Layer(flag, {key: _flag_value(key, value) if text else value}))
    for flag, (name, _) in _ALGORITHM_FLAGS.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            raw = value if name == "model" else _flag_value(name, value)
            layers.append(_Layer(flag, {_ALGORITHM: {name: raw}}))
    layers += [_assignment(text) for text in args.assignments]
    start = args.config if config_file is None else config_file
    return _resolve(layers, start, args.tuned, algorithm_sections)


def _field_at(key: str) -> FieldSpec:
    """The field of a dotted key of the sections that every algorithm has."""
    section, _, name = key.partition(".")
    nested = fields_of(TrainConfig)[section].section
    assert nested is not None
    return fields_of(nested)[name]


def _flag_value(key: str, text: str) -> Any:
    try:
        return parse_value(text)
    except ConfigError as error:
        raise ConfigError(f"{key} = {error}") from None


def _assignment(text: str) -> _Layer:
    """The layer of one ``--set``."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"--set {text}: expected KEY=VALUE, for example --set policy.activation=relu"
        )
    return _Layer("--set", {key: _flag_value(key, value)})


def _help_algorithms(algo: str | None, sections: AlgorithmSections | None) -> Sequence[str]:
    """The chosen algorithm, or all where none (or no known one) is chosen."""
    names = _algorithm_names(sections)
    return [algo] if algo in names else names


def _help_keys(algo: str | None, sections: AlgorithmSections | None) -> str:
    """Every key of every section with type, default, bounds and meaning."""
    parts = {name: spec.section for name, spec in fields_of(TrainConfig).items() if spec.section}
    for name in _help_algorithms(algo, sections):
        parts[name] = _algorithm_section(name, sections)
    return help_keys(TrainConfig, parts)
