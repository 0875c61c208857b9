"""Public bug reports of neighbouring projects about language models, by kind of fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from mindspore import Tensor
from mindspore import dtype as mstype
from text_run_helpers import TINY, make_grpo, reset, roll, tiny_config

from msrl_accel.algorithms.grpo import GRPO
from msrl_accel.algorithms.sft import SFT
from msrl_accel.config import resolve_config
from msrl_accel.envs.text import Problem, RewardSpec, Scorer, make_task, usable_groups
from msrl_accel.envs.text.rewards import build_reward
from msrl_accel.errors import ConfigError
from msrl_accel.lm import advantages
from msrl_accel.lm.losses import PRESETS, weigh_tokens
from msrl_accel.lm.model import CausalLM
from msrl_accel.lm.packing import Packer, Sequences
from msrl_accel.lm.rollout import Roller
from msrl_accel.lm.update import StepResult

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> T:
    """The result of `call` in another thread than the main one, or its exception."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


pytestmark = pytest.mark.usefixtures("graph_mode")


@pytest.fixture(scope="module")
def compiled() -> tuple[GRPO, Roller]:
    # GSPO clips tightest, at 0.0003.
    return make_grpo(preset="gspo")


@pytest.fixture
def grpo(compiled: tuple[GRPO, Roller]) -> tuple[GRPO, Roller]:
    reset(compiled[0])
    return compiled


# trl#6789: top_p 0.9 makes the importance ratio 0.90, top_k 50 makes it 0.171


@pytest.mark.parametrize("options", [{"top_k": 4}, {"top_k": 6, "top_p": 0.8}])
def test_the_ratio_is_one_where_sampling_keeps_only_some_tokens(options: dict[str, float]) -> None:
    algorithm, roller = make_grpo(**options)
    rollout = roll(roller)
    metrics = algorithm.update(rollout, 0.0, np.random.default_rng(0))
    assert metrics["grpo/ratio_error"] < 1e-4
    assert metrics["grpo/clip_fraction"] == 0
    assert metrics["parity/max"] < 1e-4
    # It would be wrong over the whole vocabulary: tokens are likelier among those kept.
    kept = rollout.completions.kept
    assert kept is not None
    assert max(len(set(row)) for row in kept[rollout.mask]) <= options["top_k"]


# prime-rl PR 697: log-probabilities divided by the temperature


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_the_temperature_divides_logits_not_log_probabilities(
    grpo: tuple[GRPO, Roller], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, roller = grpo
    monkeypatch.setitem(roller.sampling, "temperature", temperature)
    scalar = Tensor(temperature, mstype.float32)
    monkeypatch.setattr(algorithm.learner.update, "temperature", scalar)
    rollout = roll(roller)
    log_probs = algorithm.log_probs(rollout)
    row, length = 0, int(rollout.completions.lengths[0])
    prompt = rollout.prompts[rollout.completions.prompt_index[row]]
    tokens = np.concatenate([prompt, rollout.completions.tokens[row, :length]])[None]
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    logits = algorithm.model(*map(Tensor, (tokens, positions, np.zeros_like(tokens)))).asnumpy()[0]
    scaled = logits.astype(np.float64) / temperature
    every = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    expected = every[np.arange(len(prompt) - 1, len(prompt) + length - 1), tokens[0, len(prompt) :]]
    np.testing.assert_allclose(log_probs[row, :length], expected, atol=1e-5)
    np.testing.assert_allclose(rollout.completions.log_probs[row, :length], expected, atol=1e-5)


# verl#6280: log-probabilities at another micro-batch size give a clip fraction above 0 on-policy


@pytest.mark.parametrize("token_budget", [16, 1024])
def test_on_policy_nothing_is_clipped_at_any_micro_batch_size(
    grpo: tuple[GRPO, Roller], token_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, roller = grpo
    monkeypatch.setattr(algorithm.learner, "packer", Packer(token_budget))
    rollout = roll(roller)
    n_batches = len(algorithm.learner.packer.pack(rollout.sequences()))
    assert (n_batches > 1) == (token_budget == 16)
    metrics = algorithm.update(rollout, 0.0, np.random.default_rng(0))
    assert metrics["grpo/clip_fraction"] == 0
    assert metrics["grpo/ratio_error"] < 1e-5
    assert abs(metrics["grpo/approx_kl"]) < 1e-8


# AReaL PR 1673: [1, 2, 3] in groups of 2 gives 300000


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_completion_alone_in_its_group_is_an_error_not_a_huge_advantage(advantage: str) -> None:
    settings = PRESETS["grpo"].replace(advantage=advantage)
    groups, rewards = np.array([0, 0, 1]), np.array([1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="completion 2 is alone in its group"):
        weigh_tokens(settings, rewards, groups, np.ones((3, 2), bool), 2)


# verl#7278: mask [1, 1, 0, 0, 1, 1] with a final reward of 1 and gamma 1


def test_the_return_reaches_tokens_before_those_the_model_did_not_choose() -> None:
    mask = np.array([[1, 1, 0, 0, 1, 1]], bool)
    rewards = np.array([[0, 0, 0, 0, 0, 1.0]])
    returns = advantages.returns_to_go(rewards, mask, gamma=1.0)
    np.testing.assert_array_equal(returns, mask.astype(float))
    discounted = advantages.returns_to_go(rewards, mask, gamma=0.5)
    np.testing.assert_array_equal(discounted, [[0.125, 0.25, 0, 0, 0.5, 1]])


# trl PR 7039: only one end token is honoured


def test_every_end_token_ends_a_completion(grpo: tuple[GRPO, Roller]) -> None:
    _, roller = grpo
    ends = (1, 5, 9)
    prompts = [roller.encoder.prompt(Problem("12+23=", "35"))] * 3
    parts = [
        roller.generator.generate(prompts, 4, np.random.default_rng(seed), eos_ids=ends)
        for seed in range(8)
    ]
    reached = set()
    for part in parts:
        for row, length, stop in zip(part.tokens, part.lengths, part.stop):
            assert not set(row[: length - 1].tolist()) & set(ends)
            assert (stop == "eos") == (int(row[length - 1]) in ends)
            reached.add(int(row[length - 1]))
    assert set(ends) <= reached


# verl#7200: 10 + 6 tokens divide by 16 under any micro-batching


@pytest.mark.parametrize("token_budget", [13, 64])
def test_sixteen_tokens_count_the_same_in_one_micro_batch_or_two(token_budget: int) -> None:
    options = {**TINY, "token_budget": token_budget}
    config = resolve_config("sft", "text/addition", tuned=False, sft=options)
    sft = SFT(config, CausalLM(tiny_config(), seed=3))
    rng = np.random.default_rng(0)
    lengths = np.array([10, 6])
    examples = Sequences(
        prompts=[np.array([4, 5], np.int32), np.array([6, 7, 8], np.int32)],
        prompt_index=np.arange(2),
        tokens=rng.integers(2, 14, (2, 10)).astype(np.int32),
        lengths=lengths,
        mask=np.arange(10) < lengths[:, None],
    )
    assert len(sft.learner.packer.pack(examples)) == (2 if token_budget == 13 else 1)
    log_probs = np.zeros((2, 10), np.float32)
    step = sft.learner.update.step

    def watched(*arguments: Any) -> StepResult:
        result = step(*arguments)
        log_probs[:] = result.log_probs
        return result

    sft.learner.update.step = watched
    loss = sft.update(examples, 0.0)["loss"]
    assert np.count_nonzero(log_probs) == 16
    assert loss == pytest.approx(-log_probs.sum(dtype=np.float64) / 16, abs=1e-6)


# verl PR 5635: off the main thread math_verify's alarm fails, and every score is 0


def test_mathematics_is_judged_right_whatever_thread_scores() -> None:
    pytest.importorskip("math_verify")
    problems = [Problem("half?", "1/2")] * 3
    completions = [r"\boxed{\frac{1}{2}}", "It is 0.5", "It is 0.4"]
    with Scorer(make_task("text/addition"), "math", workers=2) as scorer:
        scores = in_thread(lambda: scorer.score(problems, completions))
    assert [score.value for score in scores] == [1.0, 1.0, 0.0]


def test_a_verifier_that_needs_the_main_thread_never_answers_0_outside_of_it() -> None:
    pytest.importorskip("math_verify")
    reward = build_reward(RewardSpec("math"))
    with pytest.raises(ValueError, match="thread"):
        in_thread(lambda: reward(Problem("half?", "1/2"), "0.5"))
    with Scorer(make_task("text/addition"), "math", workers=0) as scorer:
        (score,) = in_thread(lambda: scorer.score([Problem("half?", "1/2")], ["0.5"]))
    assert score.value is None
    assert "thread" in score.reason


def test_a_verifier_that_runs_out_of_time_has_failed_and_its_group_is_left_out() -> None:
    pytest.importorskip("math_verify")
    problems = [Problem("three?", "3")] * 4
    completions = ["3", "4", "3", "$9^{9^{9^{9}}}$"]
    rewards = [{"name": "math", "kwargs": {"seconds": 1}}]
    with Scorer(make_task("text/addition"), rewards, workers=2) as scorer:
        scores = scorer.score(problems, completions)
        assert scorer.restarts == 0
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, None]
    assert "TimeoutException" in scores[3].reason
    assert usable_groups(scores, 2).tolist() == [True, False]


@pytest.mark.parametrize(
    "function",
    [
        "operator:truediv",  # raises: a Problem cannot be divided
        "builtins:print",  # returns None
        "os:abort",  # raises: it takes no arguments
        "builtins:isinstance",  # raises
    ],
)
def test_a_reward_function_that_fails_is_no_reward_of_0(function: str) -> None:
    problem = Problem("2+3=", "5")
    with Scorer(make_task("text/addition"), f"task + {function}", workers=1) as scorer:
        (score,) = scorer.score([problem], ["5"])
    assert score.value is None
    assert score.parts == {"task": 1.0, function: None}
    assert function in score.reason
