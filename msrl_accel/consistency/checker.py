"""The check itself: one baseline, every other form of the policy, the same calls."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl_accel.consistency.compare import Comparison, Tolerances
from msrl_accel.consistency.drift import drift_test
from msrl_accel.consistency.episodes import Episodes, episode_parity, play, record_observations
from msrl_accel.consistency.invariance import ROWS, check_batch_invariance
from msrl_accel.consistency.layers import Divergence, first_divergence
from msrl_accel.consistency.observations import (
    BATCHES,
    Case,
    make_cases,
    make_observations,
    repeat_rows,
)
from msrl_accel.consistency.precision import PrecisionReport, rehearse_precision
from msrl_accel.consistency.report import BackendResult, ConsistencyReport
from msrl_accel.consistency.subject import BundleLike, Subject
from msrl_accel.errors import BundleError, ConfigError, MsrlError
from msrl_accel.export.bundle import Bundle
from msrl_accel.runtime.base import ActResult, PolicyRuntime
from msrl_accel.runtime.batch_invariant import BatchInvariantRuntime
from msrl_accel.spaces import Observations

if TYPE_CHECKING:
    from msrl_accel.policy import Policy
    from msrl_accel.run import Run

TOLERANCES = {"graph": Tolerances.exact(), "mindir": Tolerances.exact()}
"""Of the forms that have to be bit-equal with the training graph; others have the defaults."""
RECORDED_ROWS = 2048
DRIFT_BATCH = 32
"""Perturbed policies are compared at this batch size alone."""

Answer = tuple[Case, ActResult]


def check_consistency(
    bundle: BundleLike | None = None,
    *,
    run: Run | str | Path | None = None,
    policy: Policy | None = None,
    runtimes: Mapping[str, PolicyRuntime] | None = None,
    backends: Sequence[str] | None = None,
    episodes: int = 0,
    observations: Observations | None = None,
    rows: int = RECORDED_ROWS,
    batches: Sequence[int] = BATCHES,
    batch_invariance: bool = False,
    drift: bool = False,
    precision: Sequence[str] = (),
    tolerances: Mapping[str, Tolerances] | None = None,
    seed: int = 0,
) -> ConsistencyReport:
    """Compare every form of a policy with one baseline, on the same calls.

    The baseline is the training graph in inference position: `policy`, that of `run`, or one with
    the bundle's weights. Where MindSpore is missing it is what the training graph gave when the
    bundle was exported.

    Args:
        bundle: an exported policy, or its folder.
        run: the run it is from; the checkpoint of the bundle's version is loaded.
        policy: the training graph itself, instead of `run`.
        runtimes: open engines to compare, by name, in addition to the bundle's.
        backends: which of 'mindir', 'onnx', 'lite', 'ms', 'om'; None for every one the bundle
            holds, leaving out what cannot run here.
        episodes: whole episodes to play with each form, deterministic and as many sampled.
        observations: recorded observations [N, ...]; None records `rows` in the run's environment.
        batches: sizes of the calls.
        batch_invariance: also check each form with `batch_invariant=True`, on 10,000 rows.
        drift: also check that small damage to each form is seen.
        precision: modes to rehearse; see `msrl_accel.consistency.precision`.
        tolerances: by form, instead of the defaults.
        seed: of observations, noise and episodes.

    Raises:
        BundleError: the bundle is damaged. ConfigError: nothing to compare, or a bad option.
        PolicyError: a backend asked for cannot be used here; the message says what adds it.
    """
    subject = Subject.of(bundle, run, policy)
    with contextlib.ExitStack() as stack:
        allowed = {**TOLERANCES, **(tolerances or {})}
        check = _Check(subject, _open_baseline(subject), allowed, seed)
        opened, missing = _open_backends(subject, backends, check.baseline.name, stack)
        check.prepare(observations, rows, tuple(batches))
        check.run({**opened, **(runtimes or {})}, episodes, batch_invariance, drift)
        report = check.report()
        report.results.update(
            {name: BackendResult(name, None, why, False) for name, why in missing}
        )
        if precision:
            report.precision = _rehearse(subject, check.recorded, precision, episodes, seed)
        return report


def recommend_precision(
    source: Policy | BundleLike,
    observations: Observations | None = None,
    *,
    run: Run | str | Path | None = None,
    modes: Sequence[str] | None = None,
    episodes: int = 0,
    rows: int = RECORDED_ROWS,
    seed: int = 0,
) -> PrecisionReport:
    """Rehearse lower precisions and recommend a `--precision_mode_v2` of ATC.

    Args:
        source: a policy graph, a bundle, or a bundle's folder.
        observations: [N, ...] each, best recorded in rollouts. None records `rows` in the
            environment of `run`, or of the bundle's configuration; without either they are random.
        modes: of `msrl_accel.consistency.precision.MODES`; None for all.
        episodes: whole episodes to play in each mode.

    Returns:
        A report whose `recommended` is the fastest mode within the limits, 'origin' if none is.
    """
    from msrl_accel.consistency.precision import MODES

    is_bundle = isinstance(source, (Bundle, str, Path))
    bundle, policy = (source, None) if is_bundle else (None, source)
    subject = Subject.of(bundle, run, policy)  # type: ignore[arg-type]
    if observations is None:
        rng = np.random.default_rng([seed, 5])
        observations = (
            make_observations(subject.spec, "random", rows, rng, statistics=subject.arrays)
            if subject.config is None
            else record_observations(subject.numpy_policy(), subject.config, rows, seed)
        )
    return _rehearse(subject, observations, modes or tuple(MODES), episodes, seed)


@dataclass
class _Baseline:
    """What the others are compared to."""

    name: str
    description: str
    runtime: PolicyRuntime | None
    """None where only recorded outputs are there."""


def _open_baseline(subject: Subject) -> _Baseline:
    if subject.policy is None:
        what = "outputs of the training graph recorded in the bundle (MindSpore is not here)"
        return _Baseline("reference", what, None)
    from msrl_accel.runtime.graph import GraphRuntime

    what = f"the training graph in inference position ({subject.origin})"
    return _Baseline("graph", what, GraphRuntime(subject.policy))


def _open_backends(
    subject: Subject, wanted: Sequence[str] | None, baseline: str, stack: contextlib.ExitStack
) -> tuple[dict[str, PolicyRuntime], list[tuple[str, str]]]:
    """Open engines by name, and the names of those left out with the reason."""
    if subject.bundle is None:
        return {}, []
    from msrl_accel.runtime.load import available_backends, open_runtime

    usable = available_backends(subject.bundle)
    names = subject.bundle.manifest["models"] if wanted is None else wanted
    opened: dict[str, PolicyRuntime] = {}
    missing = []
    for name in dict.fromkeys(names):
        if name == baseline:
            continue
        if name not in usable:
            raise ConfigError(f"backend {name!r} is unknown: use one of {', '.join(usable)}")
        if wanted is None and not usable[name][0]:
            missing.append((name, usable[name][1]))
            continue
        opened[name] = open_runtime(subject.bundle, name)
        stack.callback(opened[name].close)
    return opened, missing


def reference_answers(bundle: Bundle) -> list[Answer]:
    """The calls that a bundle recorded, and what the training graph gave."""
    arrays, spec = bundle.reference(), bundle.spec
    observations = tuple(arrays[f"observation/{o.name}"] for o in spec.observations)
    answers = []
    for mode in ("deterministic", "sampled"):
        noise = arrays["noise"] if mode == "sampled" else np.zeros_like(arrays["noise"])
        outputs = [arrays[f"{mode}/{name}"] for name in bundle.output_names]
        result = ActResult.of(spec, outputs)
        answers.append((Case("reference", mode == "deterministic", observations, noise), result))
    return answers


@dataclass
class _Check:
    """The calls, the baseline's answers, and the results so far."""

    subject: Subject
    baseline: _Baseline
    tolerances: Mapping[str, Tolerances]
    seed: int
    answers: list[Answer] = field(default_factory=list)
    recorded: Observations = ()
    results: dict[str, BackendResult] = field(default_factory=dict)

    def prepare(
        self, observations: Observations | None, rows: int, batches: tuple[int, ...]
    ) -> None:
        """Make the calls and have the baseline answer them."""
        bundle, runtime = self.subject.bundle, self.baseline.runtime
        reference = [] if bundle is None else reference_answers(bundle)
        if runtime is None:
            self.answers = reference
            self.recorded = reference[0][0].observations
            return
        if observations is None and self.subject.config is not None:
            observations = record_observations(runtime, self.subject.config, rows, self.seed)
        spec, arrays = self.subject.spec, self.subject.arrays
        cases = make_cases(
            spec, recorded=observations, statistics=arrays, batches=batches, seed=self.seed
        )
        self.answers = [(case, runtime.act(case.observations, case.noise)) for case in cases]
        self.recorded = observations or self.answers[-1][0].observations
        if reference:
            comparison = self._comparison("reference")
            for case, recorded in reference:
                got = runtime.act(case.observations, case.noise)
                comparison.add(got, recorded, case.noise, str(case))
            self.results["reference"] = BackendResult("reference", comparison)

    def run(
        self,
        runtimes: Mapping[str, PolicyRuntime],
        episodes: int,
        batch_invariance: bool,
        drift: bool,
    ) -> None:
        """Compare each engine, and the loss position of the training graph."""
        if self.subject.policy is not None:
            self._compare_loss(self.subject.policy)
        played = self._play(self.baseline.runtime, episodes)
        for name, runtime in runtimes.items():
            result = self._compare(name, runtime)
            self.results[name] = result
            if result.comparison is None:
                continue
            if played is not None:
                result.episodes = episode_parity(played, self._play(runtime, episodes) or played)
            if batch_invariance:
                result.invariance = self._invariance(runtime)
            if drift:
                result.drift = self._drift(name, runtime)
            if result.comparison.problems():
                result.divergence = self._divergence(name)

    def report(self) -> ConsistencyReport:
        kinds = tuple(dict.fromkeys(case.kind for case, _ in self.answers))
        return ConsistencyReport(
            subject=self.subject.name,
            baseline=self.baseline.description,
            results=self.results,
            calls=len(self.answers),
            rows=sum(case.batch for case, _ in self.answers),
            kinds=kinds,
        )

    def _comparison(self, name: str, outputs: tuple[str, ...] | None = None) -> Comparison:
        tolerances = self.tolerances.get(name, Tolerances())
        return Comparison(self.subject.spec, outputs or self.subject.spec.output_names, tolerances)

    def _compare_loss(self, policy: Policy) -> None:
        from msrl_accel.consistency.loss import LossPosition

        loss = LossPosition(policy)
        comparison = self._comparison("loss", loss.outputs)
        for case, expected in self.answers:
            got = loss.act(case.observations, case.noise, expected)
            comparison.add(expected, got, case.noise, str(case))
        self.results["loss"] = BackendResult("loss", comparison)

    def _compare(self, name: str, runtime: PolicyRuntime) -> BackendResult:
        comparison = self._comparison(name)
        try:
            for case, expected in self.answers:
                got = runtime.act(case.observations, case.noise)
                comparison.add(expected, got, case.noise, str(case))
        except (MsrlError, ValueError) as error:
            return BackendResult(
                name, None, f"failed on {case}: {textwrap.shorten(str(error), 300)}"
            )
        return BackendResult(name, comparison)

    def _play(self, runtime: PolicyRuntime | None, episodes: int) -> Episodes | None:
        if not episodes or runtime is None:
            return None
        if self.subject.config is None:
            raise ConfigError(f"episodes = {episodes}: no environment is known; give the run")
        return play(runtime, self.subject.config, episodes, self.seed)

    def _invariance(self, runtime: PolicyRuntime) -> Any:
        rng = np.random.default_rng([self.seed, 6])
        spec, arrays = self.subject.spec, self.subject.arrays
        observations = make_observations(spec, "random", ROWS // 2, rng, statistics=arrays)
        recorded = repeat_rows(self.recorded, ROWS - ROWS // 2)
        both = tuple(np.concatenate([a, b]) for a, b in zip(observations, spec.cast(recorded)))
        invariant = BatchInvariantRuntime(runtime)
        return check_batch_invariance(invariant, both, spec.draw_noise(rng, (ROWS,)))

    def _drift(self, name: str, runtime: PolicyRuntime) -> Any:
        if not self.subject.arrays:
            raise BundleError(
                "the drift test needs the policy's weights: give --run, or install "
                "'msrl_accel[onnx]' to read them from the bundle"
            )
        answers = [a for a in self.answers if a[0].batch == DRIFT_BATCH] or self.answers
        tolerances = self.tolerances.get(name, Tolerances())
        return drift_test(runtime, self.subject.arrays, answers, tolerances)

    def _divergence(self, name: str) -> Divergence | None:
        """Where a file of the bundle parts from the network; None where that cannot be told."""
        bundle, arrays = self.subject.bundle, self.subject.arrays
        file = (
            None if bundle is None or name not in bundle.manifest["models"] else bundle.file(name)
        )
        if file is None or not arrays or name in ("om", "ms"):
            return None
        case, expected = max(self.answers, key=lambda answer: answer[0].batch)
        reference = self.subject.numpy_policy()
        with contextlib.suppress(MsrlError):  # onnx or onnxruntime is missing
            inputs = (case.observations, case.noise, expected)
            return first_divergence(file, name, reference, arrays, *inputs)
        return None


def _rehearse(
    subject: Subject,
    observations: Observations,
    modes: Sequence[str],
    episodes: int,
    seed: int,
) -> PrecisionReport:
    if not subject.arrays:
        raise BundleError(
            "the precision rehearsal needs the policy's weights: give --run, or install "
            "'msrl_accel[onnx]' to read them from the bundle"
        )
    return rehearse_precision(
        subject.spec,
        subject.arrays,
        observations,
        activation=subject.activation,
        observation_clip=subject.observation_clip,
        modes=modes,
        config=subject.config,
        episodes=episodes,
        seed=seed,
    )
