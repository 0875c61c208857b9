"""What the tests of language model runs share: a very small model, and runs of a few iterations."""

from __future__ import annotations

import json

import numpy as np
from run_helpers import settings

from msrl_accel.config import resolve_config
from msrl_accel.envs.text import Scorer, make_task
from msrl_accel.lm.config import LMConfig
from msrl_accel.lm.generation import Generator
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.prompts import PromptEncoder
from msrl_accel.lm.rollout import Roller
from msrl_accel.lm.tokenizer import CharTokenizer
from msrl_accel.lm.weights import save_model

ALPHABET = "0123456789+="
GROUP, PROMPTS = 4, 3
ROWS = GROUP * PROMPTS
"""Completions of one iteration of `grpo`."""

TINY = {
    "max_prompt_tokens": 12,
    "max_new_tokens": 4,
    "recompute": True,
    "offload": True,
    "pass_samples": GROUP,
}
COMMON = {
    "evaluation.episodes": PROMPTS,  # shapes of evaluations are then those of training
    "logging.tensorboard": False,
    "checkpoint.interval_seconds": 0,
}


def tiny_config(**changes) -> LMConfig:
    fields = {
        "architecture": "llama",
        "vocab_size": len(ALPHABET) + 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 8,
        "tie_embeddings": True,
        "max_positions": 32,
        "eos_ids": (1,),
        "pad_id": 0,
    }
    return LMConfig(**{**fields, **changes})


def save_tiny(folder, seed=0, **changes):
    """A model folder; its completions are nearly uniform over the alphabet."""
    config = tiny_config(**changes)
    save_model(folder, config, CausalLM(config, seed).arrays(), CharTokenizer(ALPHABET))
    return folder


def language_run(algo, model, run_dir, *more, steps, env="text/addition", **values):
    """Command line of a run; keys without a dot are the algorithm's."""
    given = {k.replace("__", "."): v for k, v in values.items()}
    keys = {**{f"{algo}.{k}": v for k, v in TINY.items()}, **COMMON}
    keys.update({k if "." in k else f"{algo}.{k}": v for k, v in given.items()})
    command = ["--algo", algo, "--env", env, "--no-tuned", "--run-dir", str(run_dir)]
    command += ["--model", str(model), "--total-steps", str(steps), "--quiet"]
    return [*command, *settings(**keys), *map(str, more)]


def grpo(model, run_dir, *more, iterations=2, **values):
    """Command line that trains by GRPO for some iterations of ROWS completions."""
    values = {"group_size": GROUP, "prompts_per_iteration": PROMPTS, **values}
    steps = values.pop("steps", ROWS * iterations)
    return language_run("grpo", model, run_dir, *more, steps=steps, **values)


def metrics_rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make_grpo(**options):
    """GRPO on a new model, and what samples for it, with a reward that varies."""
    from msrl_accel.algorithms.grpo import GRPO

    config = resolve_config("grpo", "text/addition", tuned=False, grpo={**TINY, **options})
    model = CausalLM(tiny_config(), seed=3)
    generator = Generator(model, config.algorithm.max_new_tokens)
    scorer = Scorer(make_task("text/addition"), "small_rewards:even", workers=0)
    encoder = PromptEncoder(CharTokenizer(ALPHABET))
    return GRPO(config, model), Roller(generator, encoder, scorer, **config.algorithm.sampling)


def reset(algorithm):
    """Back to the start, as `make_grpo` gave it: nothing compiles anew."""
    algorithm.model.load_arrays(CausalLM(tiny_config(), seed=3).arrays())
    state = algorithm.learner.update.state()
    moments = {name: np.zeros_like(array) for name, array in state["moments"].items()}
    algorithm.learner.update.restore({"steps": 0, "moments": moments})


def roll(roller, seed=0):
    """A rollout of PROMPTS groups of GROUP completions."""
    rng = np.random.default_rng(seed)
    return roller.roll(roller.scorer.task.sample(rng, PROMPTS), GROUP, rng)
