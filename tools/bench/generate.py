"""Tokens a second of text generation on CPU: msrl_accel against transformers, same weights.

Three Llama models with random weights, of 1, 10 and 135 million parameters (the last in the shape
of SmolLM2-135M), batches of 8 and 32. Every row has a random prompt of its own of 32 tokens and
continues it by 128, drawn from the whole vocabulary at temperature 1; no token ends a row. Prefill
counts, compilation and loading do not. Both sides compute in float32 on two threads.

- msrl_accel: `Generator.generate`; also gives the log-probability of every token.
- transformers: `model.generate(do_sample=True)` with its default cache and attention, in inference
  mode; gives tokens alone.

Contestants are processes of their own and take turns. Before anything is timed both continue one
prompt greedily, and must choose the same tokens. Shown is the best of the calls of a turn, its
median over the turns; ratios are taken turn by turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _report import (
    BenchmarkError,
    Contestant,
    begin,
    finish,
    make_parser,
    median_and_range,
    positive_int,
    present,
    run_child,
    table,
)

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "n_layers": 5}
    | {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32},
    "10M": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "n_layers": 10}
    | {"n_heads": 8, "n_kv_heads": 4, "head_dim": 32},
    "135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "n_layers": 30}
    | {"n_heads": 9, "n_kv_heads": 3, "head_dim": 64},
}
BATCHES = (8, 32)
PROMPT = 32
GREEDY = 16
"""Tokens that contestants must agree on."""
OURS, PEER = "ours", "transformers"
CONTESTANTS = {
    OURS: Contestant("msrl_accel", "msrl_accel", peer=False),
    PEER: Contestant("transformers", "transformers"),
}

Generate = Callable[[np.ndarray, int, bool], np.ndarray]
"""prompts [N, P], new tokens, greedy -> tokens [N, new tokens]."""


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    p.add_argument("--rounds", type=positive_int, default=3, help="turns of each contestant")
    p.add_argument("--calls", type=positive_int, default=3, help="timed calls of each turn")
    p.add_argument("--new-tokens", type=positive_int, default=128)
    p.add_argument("--threads", type=positive_int, default=2)
    p.add_argument("--folder", help=argparse.SUPPRESS)  # set in child processes only
    return p


def write_model(folder: Path, size: str) -> None:
    """Random weights in the form that both sides read."""
    from msrl_accel.lm.config import LMConfig
    from msrl_accel.lm.layers import initial_weight
    from msrl_accel.lm.safetensors_io import write_safetensors

    config = LMConfig("llama", tie_embeddings=True, max_positions=2048, **SIZES[size])
    rng = np.random.default_rng(0)
    shapes = config.weight_shapes()
    arrays = {name: initial_weight(config, name, shape, rng) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    write_safetensors(folder / "model.safetensors", arrays, "float32")


def load_ours(args: argparse.Namespace) -> Generate:
    from msrl_accel.config import RuntimeConfig
    from msrl_accel.device import set_up
    from msrl_accel.lm.config import LMConfig
    from msrl_accel.lm.generation import Generator
    from msrl_accel.lm.model import CausalLM
    from msrl_accel.lm.safetensors_io import read_safetensors

    set_up(RuntimeConfig(threads=args.threads))
    folder = Path(args.folder)
    config = LMConfig.from_dict(json.loads((folder / "config.json").read_text()))
    model = CausalLM(config, seed=None)
    model.load_arrays(read_safetensors(folder / "model.safetensors"))
    generator = Generator(model, args.new_tokens, prompt_buckets=(PROMPT,))
    rng = np.random.default_rng(0)

    def generate(prompts: np.ndarray, new_tokens: int, greedy: bool) -> np.ndarray:
        noise = None if greedy else rng
        return generator.generate(list(prompts), 1, noise, max_new_tokens=new_tokens).tokens

    return generate


def load_peer(args: argparse.Namespace) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: np.ndarray, new_tokens: int, greedy: bool) -> np.ndarray:
        sampling = {"do_sample": False}
        if not greedy:
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        ids = torch.from_numpy(prompts.astype(np.int64))
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                pad_token_id=0,
                **sampling,
            )
        return out[:, prompts.shape[1] :].numpy()

    return generate


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the fastest call for each batch, and the greedy continuation."""
    generate = {OURS: load_ours, PEER: load_peer}[args.contestant](args)
    rng = np.random.default_rng(0)
    (size,) = args.sizes
    found: dict[str, Any] = {}
    for batch in BATCHES:
        prompts = rng.integers(0, SIZES[size]["vocab_size"], (batch, PROMPT), dtype=np.int32)
        greedy = generate(prompts, min(GREEDY, args.new_tokens), True)
        found.setdefault("greedy", greedy[0].tolist())
        generate(prompts, args.new_tokens, False)
        seconds = []
        for _ in range(args.calls):
            start = time.perf_counter()
            generate(prompts, args.new_tokens, False)
            seconds.append(time.perf_counter() - start)
        found[str(batch)] = batch * args.new_tokens / min(seconds)
    return found


Turns = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""Size -> contestant -> turns."""


def ratios(turns: Turns) -> dict[tuple[str, int], list[float]]:
    """Speed relative to transformers by size and batch, turn by turn."""
    return {
        (size, batch): [
            ours[str(batch)] / peer[str(batch)] for ours, peer in zip(by[OURS], by[PEER])
        ]
        for size, by in turns.items()
        if OURS in by and PEER in by
        for batch in BATCHES
    }


def report(turns: Turns) -> str:
    header = ["model", "batch", *(c.label for c in CONTESTANTS.values()), "ratio"]
    found = ratios(turns)
    rows = []
    for size, by in turns.items():
        for batch in BATCHES:
            row = [size, str(batch)]
            for name in CONTESTANTS:
                speeds = [turn[str(batch)] for turn in by.get(name, ())]
                row.append(f"{statistics.median(speeds):,.0f}" if speeds else "")
            ratio = found.get((size, batch))
            row.append(median_and_range(ratio, 2) if ratio else "")
            rows.append(row)
    text = f"tokens a second\n{table(header, rows)}"
    if found:
        medians = [statistics.median(ratio) for ratio in found.values()]
        text += f"\n\ngeometric mean of the ratios {statistics.geometric_mean(medians):.2f}"
        text += f", smallest {min(medians):.2f}"
    return text


def check_agreement(size: str, turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raises BenchmarkError where contestants continue a prompt differently."""
    answers = {name: found[-1]["greedy"] for name, found in turns.items()}
    if len({tuple(answer) for answer in answers.values()}) > 1:
        raise BenchmarkError(f"{size}: the contestants choose different tokens: {answers}")


def rounds(
    args: argparse.Namespace,
    script: str,
    contestants: Mapping[str, Contestant],
    write: Callable[[Path, str], None],
    options: Sequence[str],
    describe: Callable[[Mapping[str, Any]], str],
) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Let contestants take turns at each of `--sizes`; gives size and turns after every round.

    Args:
        script: run with `options` for each turn, on a folder that `write` has filled for the size.
        describe: what a turn found, in a few words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for size in args.sizes:
            folder = Path(scratch) / size
            write(folder, size)
            common = ["--folder", str(folder), "--sizes", size, "--threads", str(args.threads)]
            by: dict[str, list[Any]] = {name: [] for name in contestants}
            for round_ in range(args.rounds):
                for name, contestant in contestants.items():
                    python = args.peer_python if contestant.peer else sys.executable
                    turn = run_child(python, script, ["--contestant", name, *common, *options])
                    by[name].append(turn)
                    print(
                        f"{size}, round {round_ + 1}: {contestant.label}: {describe(turn)}",
                        flush=True,
                    )
                yield size, by


def describe(turn: Mapping[str, Any]) -> str:
    """The speed of one turn."""
    return "tokens/s " + ", ".join(f"{b}: {turn[str(b)]:,.0f}" for b in BATCHES)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps(measure(args)))
        return
    facts = begin(args, ["transformers", "torch", "numpy"])
    contestants = present(CONTESTANTS, args.peer_python)
    options = ["--calls", str(args.calls), "--new-tokens", str(args.new_tokens)]
    turns: dict[str, dict[str, list[Any]]] = {}
    for size, by in rounds(args, __file__, contestants, write_model, options, describe):
        check_agreement(size, by)
        turns[size] = by
    print(f"\n{report(turns)}")
    finish(args, facts, turns)


if __name__ == "__main__":
    main()
