"""Seconds of one GRPO iteration on CPU: msrl_accel against TRL's GRPOTrainer, same weights.

Llama models with random weights, of 1, 10 and 135 million parameters. An iteration is everything:
8 prompts of 32 tokens (`--prompt-tokens`) are drawn, 8 completions of each sampled at temperature 1
(at most 32 tokens; the model may end one sooner), texts decoded, rewards computed by a function
(the share of words with an even number), advantages, and one AdamW step on all 64 completions with
the same loss (GRPO, no reference model). Loading, compilation and the first iterations, in which
MindSpore tries out how to launch a graph, are left out. Both sides compute in float32 on two
threads.

- msrl_accel: `GRPOTrainer.iterate`, with its metrics and its parity figures.
- TRL: `GRPOTrainer.train` with generation by transformers, all completions in one forward and
  backward pass, no gradient checkpointing and no logging.

Contestants are processes of their own and take turns. Shown is the median iteration of a turn, its
median over the turns; ratios are taken turn by turn, tokens are the mean of a completion.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _report import (
    Contestant,
    begin,
    finish,
    make_parser,
    median_and_range,
    positive_int,
    present,
    table,
)
from generate import SIZES, rounds, write_model

PROMPTS, GROUP = 8, 8
COMPLETION = 32
"""The most tokens of one."""
LEARNING_RATE = 1e-6
EOS = 0
OURS, PEER = "ours", "trl"
CONTESTANTS = {
    OURS: Contestant("msrl_accel", "msrl_accel", peer=False),
    PEER: Contestant("TRL", "trl"),
}


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__)
    p.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["1M", "10M"])
    p.add_argument("--rounds", type=positive_int, default=3, help="turns of each contestant")
    p.add_argument("--iterations", type=positive_int, default=10, help="timed ones of each turn")
    p.add_argument("--warm-up", type=positive_int, default=12, help="iterations before those")
    p.add_argument("--prompt-tokens", type=positive_int, default=32, help="of each prompt")
    p.add_argument("--threads", type=positive_int, default=2)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # set in child processes only
    return p


def write_task(prompt_tokens: int, folder: Path, size: str) -> None:
    """A model, its tokenizer of numbered words, and prompts."""
    write_model(folder, size)
    vocab_size = SIZES[size]["vocab_size"]
    config = json.loads((folder / "config.json").read_text())
    config.update(eos_token_id=EOS, pad_token_id=EOS)
    (folder / "config.json").write_text(json.dumps(config))
    words = {"</s>": EOS, **{str(i): i for i in range(1, vocab_size)}}
    special = {"id": EOS, "content": "</s>", "single_word": False, "lstrip": False}
    special.update(rstrip=False, normalized=False, special=True)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "</s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "</s>", "pad_token": "</s>", "model_max_length": 2048}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for row in rng.integers(1, vocab_size, (512, prompt_tokens)):
            line = {"prompt": " ".join(map(str, row)), "answer": "0"}
            file.write(json.dumps(line) + "\n")


def even_share(problem: Any, completion: str) -> float:
    """The reward: a number that random completions of a group differ in."""
    words = completion.split()
    return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(len(words), 1)


def time_ours(args: argparse.Namespace) -> dict[str, float]:
    from msrl_accel.config import resolve_config
    from msrl_accel.pipeline.grpo import GRPOTrainer
    from msrl_accel.run import Run

    config = resolve_config(
        "grpo",
        f"jsonl:{args.folder / 'prompts.jsonl'}",
        tuned=False,
        total_steps=10**9,
        grpo={
            "model": str(args.folder),
            "prompts_per_iteration": PROMPTS,
            "group_size": GROUP,
            "max_prompt_tokens": args.prompt_tokens,
            "max_new_tokens": COMPLETION,
            "learning_rate": LEARNING_RATE,
            "rewards": "grpo:even_share",
            "scoring_workers": 0,
        },
        overrides={"runtime.threads": args.threads, "evaluation.episodes": PROMPTS},
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(config, Run.create(config.replace(run_dir=f"{scratch}/run")))
        seconds, lengths = [], []
        try:
            for _ in range(args.warm_up + args.iterations):
                start = time.perf_counter()
                lengths.append(trainer.iterate()["rollout/length"])
                seconds.append(time.perf_counter() - start)
        finally:
            trainer.close()
    return _result(seconds[args.warm_up :], lengths[args.warm_up :])


def time_peer(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    lines = (args.folder / "prompts.jsonl").read_text().splitlines()
    prompts = [{"prompt": json.loads(line)["prompt"]} for line in lines]
    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: Sequence[str], completion_ids: Any, **_: Any) -> list[float]:
        lengths.append(float(np.mean([len(ids) for ids in completion_ids])))
        return [even_share(None, text) for text in completions]

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS * GROUP,
            gradient_accumulation_steps=1,
            num_generations=GROUP,
            max_completion_length=COMPLETION,
            temperature=1.0,
            top_k=0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
            max_steps=args.warm_up + args.iterations,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(args.folder, padding_side="left"),
            callbacks=[Clock()],
        )
        trainer.train()
    seconds = np.diff(ends[args.warm_up - 1 :]).tolist()
    return _result(seconds, lengths[args.warm_up :])


def _result(seconds: Sequence[float], lengths: Sequence[float]) -> dict[str, float]:
    return {"seconds": statistics.median(seconds), "tokens": statistics.fmean(lengths)}


Turns = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""Size -> contestant -> turns."""


def report(turns: Turns) -> str:
    header = ["model"]
    for c in CONTESTANTS.values():
        header += [f"{c.label} s", "tokens"]
    rows, medians = [], []
    for size, by in turns.items():
        row = [size]
        for name in CONTESTANTS:
            found = by.get(name, ())
            for key, digits in (("seconds", 3), ("tokens", 1)):
                values = [turn[key] for turn in found]
                row.append(f"{statistics.median(values):.{digits}f}" if values else "")
        if OURS in by and PEER in by:
            ratio = [peer["seconds"] / ours["seconds"] for ours, peer in zip(by[OURS], by[PEER])]
            medians.append(statistics.median(ratio))
            row.append(median_and_range(ratio, 2))
        rows.append(row)
    text = f"one iteration\n{table([*header, 'times faster'], rows)}"
    if medians:
        text += f"\n\ngeometric mean of the ratios {statistics.geometric_mean(medians):.2f}"
    return text


def describe(turn: Mapping[str, Any]) -> str:
    """The time of one turn."""
    return f"{turn['seconds']:.3f} s"


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.contestant is not None:
        print(json.dumps({OURS: time_ours, PEER: time_peer}[args.contestant](args)))
        return
    facts = begin(args, ["trl", "transformers", "torch", "numpy"])
    contestants = present(CONTESTANTS, args.peer_python)
    options = []
    for name in ("iterations", "warm_up", "prompt_tokens"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    write = partial(write_task, args.prompt_tokens)
    turns = dict(rounds(args, __file__, contestants, write, options, describe))
    print(f"\n{report(turns)}")
    finish(args, facts, turns)


if __name__ == "__main__":
    main()
