"""Microseconds of one call that acts: 64-64 tanh policy of CartPole-v1, batches of 1, 32 and 256.

- msrl_accel: `load_policy(bundle, backend).act(observations)` on every backend that can be used
  here; "invariant" is the same with `batch_invariant=True`. onnx and lite compute the action alone;
  the others, and every invariant one, also log-prob, value and logits.
- stable-baselines3: `PPO("MlpPolicy", ...).predict(observations, deterministic=True)`.
- torch, eager: NumPy to tensor, forward of the actor alone, argmax, tensor to NumPy, in
  inference mode. Neither peer computes the value.

NumPy observations in, NumPy actions out, deterministic, one thread each. The benchmark exports a
bundle of its own first. Contestants are processes of their own and take turns; a backend that does
not need MindSpore runs without it, so that MindSpore Lite is in the process. After a warm-up every
call is timed on its own. Median and 99th percentile are of the calls of one turn; shown is their
median over the turns. Ratios are taken turn by turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _report import (
    Contestant,
    begin,
    finish,
    installed_versions,
    make_parser,
    median_and_range,
    ours_set_options,
    positive_int,
    present,
    run_child,
    table,
    untuned_config,
)

ENV = "CartPole-v1"
BATCHES = (1, 32, 256)
ARRAYS = 64
"""Prepared observation batches; a call takes the next one."""
BASELINE = "sb3"
PEERS = {
    BASELINE: Contestant("stable-baselines3 predict", "stable-baselines3"),
    "torch": Contestant("torch, eager", "torch"),
}

Act = Callable[[np.ndarray], Any]
Turn = dict[str, dict[str, dict[str, float]]]
"""Line of the table -> batch -> 'p50' and 'p99' in microseconds."""


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--rounds", type=positive_int, default=5, help="turns of each contestant")
    p.add_argument("--calls", type=positive_int, default=2000, help="timed calls of each batch")
    p.add_argument("--bundle", help=argparse.SUPPRESS)  # set in child processes only
    return p


def export_bundle(args: argparse.Namespace) -> dict[str, Any]:
    """Train for one iteration and export; the latency does not depend on the weights."""
    from msrl_accel.export.cli import export_run
    from msrl_accel.train import train

    bundle = Path(args.bundle)
    config = untuned_config(ENV, 8, args, n_steps=32)
    config = config.replace(total_steps=256, run_dir=str(bundle.with_name("run")), quiet=True)
    export_run(train(config), bundle)
    return {}


def measure_ours(args: argparse.Namespace) -> Turn:
    from msrl_accel.runtime.load import load_policy

    found: Turn = {}
    for suffix, invariant in (("", False), (", invariant", True)):
        policy = load_policy(args.bundle, args.contestant, batch_invariant=invariant)
        found[f"msrl_accel {args.contestant}{suffix}"] = latencies(policy.act, args.calls)
        policy.runtime.close()
    if args.contestant in ("onnx", "lite"):
        assert "mindspore" not in sys.modules
    return found


def measure_sb3(args: argparse.Namespace) -> Turn:
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    model = PPO("MlpPolicy", ENV, device="cpu", seed=0)
    act = lambda x: model.predict(x, deterministic=True)  # noqa: E731
    return {PEERS["sb3"].label: latencies(act, args.calls)}


def measure_torch(args: argparse.Namespace) -> Turn:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    hidden = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    actor = nn.Sequential(*hidden, nn.Linear(64, 2))

    def act(observations: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            actions: np.ndarray = actor(torch.from_numpy(observations)).argmax(-1).numpy()
        return actions

    return {PEERS["torch"].label: latencies(act, args.calls)}


def latencies(act: Act, calls: int) -> dict[str, dict[str, float]]:
    """Median and 99th percentile of a call in microseconds, by batch size."""
    rng = np.random.default_rng(0)
    found = {}
    for batch in BATCHES:
        shape = (4,) if batch == 1 else (batch, 4)
        arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(ARRAYS)]
        _time_calls(act, arrays, max(calls // 10, ARRAYS))
        p50, p99 = np.percentile(_time_calls(act, arrays, calls), [50, 99])
        found[str(batch)] = {"p50": float(p50), "p99": float(p99)}
    return found


def _time_calls(act: Act, arrays: Sequence[np.ndarray], calls: int) -> np.ndarray:
    """Microseconds [calls]."""
    times = np.empty(calls)
    for i in range(calls):
        observations = arrays[i % ARRAYS]
        start = time.perf_counter_ns()
        act(observations)
        times[i] = time.perf_counter_ns() - start
    return times / 1e3


def usable_backends(bundle: str) -> list[str]:
    """Backends that run the bundle here; says why the others are left out."""
    from msrl_accel.runtime.load import available_backends

    usable = []
    for name, (here, reason) in available_backends(bundle).items():
        if here:
            usable.append(name)
        else:
            print(f"msrl_accel {name} is left out: {reason}")
    return usable


def report(results: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> str:
    """A table for each batch size; the ratio is the baseline's p50 over that of the line."""
    baseline = results.get(PEERS[BASELINE].label)
    parts = []
    for batch in map(str, BATCHES):
        header, rows = ["batch " + batch, "p50 us", "p99 us"], []
        if baseline is not None:
            header.append(f"speed / {PEERS[BASELINE].label}, p50")
        for label, turns in results.items():
            row = [label]
            for key in ("p50", "p99"):
                row.append(f"{statistics.median(t[batch][key] for t in turns):,.1f}")
            if baseline is not None:
                pairs = zip(baseline, turns)
                row.append(
                    median_and_range([b[batch]["p50"] / t[batch]["p50"] for b, t in pairs], 1)
                )
            rows.append(row)
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What a child process was started for."""
    special = {"bundle": export_bundle, "sb3": measure_sb3, "torch": measure_torch}
    return special.get(args.contestant, measure_ours)(args)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps(measure(args)))
        return
    facts = begin(args, ["stable-baselines3", "torch", "numpy"])
    facts["versions"].update(installed_versions(sys.executable, ["onnxruntime"]))
    print(f"onnxruntime {facts['versions']['onnxruntime'] or 'none'}\n")
    results: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = ["--calls", str(args.calls), "--bundle", str(Path(folder) / "bundle")]
        options += ours_set_options(args)
        run_child(sys.executable, __file__, ["--contestant", "bundle", *options])
        turns = dict.fromkeys(usable_backends(str(Path(folder) / "bundle")), sys.executable)
        turns.update(dict.fromkeys(present(PEERS, args.peer_python), args.peer_python))
        for round_ in range(args.rounds):
            for name, python in turns.items():
                for label, found in run_child(
                    python, __file__, ["--contestant", name, *options]
                ).items():
                    results.setdefault(label, []).append(found)
                    p50 = ", ".join(f"{b}: {f['p50']:,.1f}" for b, f in found.items())
                    print(f"round {round_ + 1}: {label}: us by batch {p50}", flush=True)
    print(f"\n{report(results)}")
    finish(args, facts, results)


if __name__ == "__main__":
    main()
