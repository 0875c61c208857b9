"""The language model of a run, and its results on held-out problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrl_accel.envs.text import make_task
from msrl_accel.errors import EnvError, LMError
from msrl_accel.evaluation import evaluation_seed
from msrl_accel.lm.evaluation import TextEvaluation
from msrl_accel.lm.language_model import LanguageModel
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.opening import load_description
from msrl_accel.lm.prompts import PromptEncoder
from msrl_accel.lm.rollout import Roller, evaluate_problems
from msrl_accel.run import DESCRIPTION_FOLDER, Run, WhichCheckpoint, policy_arrays

if TYPE_CHECKING:
    from msrl_accel.algorithms.language_model import LanguageModelConfig


def load_language_model(run: Run, which: WhichCheckpoint = "last") -> LanguageModel:
    """The model of a checkpoint of a run.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        LMError: the run has trained no language model.
    """
    from msrl_accel.device import set_up

    checkpoint = run.checkpoints.load(which)
    if "language_model" not in checkpoint.meta:
        raise LMError(f"{run.path} has trained no language model, but {run.config.algo}")
    set_up(run.config.runtime)
    options: LanguageModelConfig = run.config.algorithm  # type: ignore[assignment]
    opened = load_description(run.path / DESCRIPTION_FOLDER)
    model = CausalLM(opened.config, seed=None)
    model.load_arrays(policy_arrays(checkpoint))
    encoder = PromptEncoder(opened.tokenizer, options.prompt, options.system_prompt)
    found = LanguageModel(model, encoder, options.max_new_tokens, options.rollout_rows)
    found.generator.version = checkpoint.step
    return found


def evaluate_language_model(
    run: Run,
    problems: int,
    *,
    deterministic: bool = True,
    checkpoint: WhichCheckpoint = "last",
    seed: int | None = None,
) -> TextEvaluation:
    """Completions of the first held-out problems: greedy, or `pass_samples` of each.

    Args:
        seed: of the samples; default that of the run's own evaluations.

    Raises:
        EnvError: the task cannot be made, has no held-out problems, or nothing could be scored.
    """
    model = load_language_model(run, checkpoint)
    config = run.config
    options: LanguageModelConfig = config.algorithm  # type: ignore[assignment]
    task = make_task(config.env, **config.env_kwargs)
    held_out = model.encoder.short(task.held_out(problems), options.max_prompt_tokens)
    if not held_out:
        raise EnvError(f"{config.env} has no held-out problems with short enough prompts")
    samples = 1 if deterministic else options.pass_samples
    if seed is None and not deterministic:
        seed = evaluation_seed(config)
    with options.make_scorer(task) as scorer:
        roller = Roller(model.generator, model.encoder, scorer, **options.sampling)
        return evaluate_problems(roller, held_out, samples, seed)[0]
