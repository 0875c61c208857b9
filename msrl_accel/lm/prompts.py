"""Problems as tokens: prompts, and right answers to learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msrl_accel.envs.text import Problem, TextTask
from msrl_accel.errors import EnvError, LMError
from msrl_accel.lm.packing import Sequences
from msrl_accel.lm.tokenizer import Tokenizer

STYLES = ("auto", "plain", "chat")


class PromptEncoder:
    """Token ids of prompts and answers.

    Args:
        tokenizer: that of the model.
        style: "plain" gives the model the prompt's text alone, "chat" makes it a user's message in
            the model's chat template, "auto" does so where the tokenizer has a template.
        system_prompt: a system message before it; None leaves that to the template.

    Raises:
        LMError: the model has no end token, or no template for "chat" or a system prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, style: str = "auto", system_prompt: str | None = None
    ) -> None:
        if not tokenizer.eos_ids:
            raise LMError("the model has no end token, so its completions would never end")
        self.tokenizer = tokenizer
        has_template = tokenizer.chat_template is not None
        self.chat = style == "chat" or (style == "auto" and has_template)
        if self.chat and not has_template:
            raise LMError("prompt = 'chat': the tokenizer has no chat template; use plain")
        if system_prompt is not None and not self.chat:
            raise LMError(f"system_prompt = {system_prompt!r}: only chat templates have a place")
        self.system_prompt = system_prompt

    def prompt(self, problem: Problem) -> np.ndarray:
        """Token ids of what the model is asked [P] int32."""
        if not self.chat:
            ids = self.tokenizer.encode(problem.prompt, add_special_tokens=True)
        else:
            messages = [{"role": "user", "content": problem.prompt}]
            if self.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": self.system_prompt})
            ids = self.tokenizer.chat(messages)
        return np.array(ids, np.int32)

    def short(self, problems: Sequence[Problem], longest: int) -> list[Problem]:
        """The problems whose prompts have at most `longest` tokens."""
        return [problem for problem in problems if len(self.prompt(problem)) <= longest]

    def draw(self, task: TextTask, rng: np.random.Generator, n: int, longest: int) -> list[Problem]:
        """n problems of a task, none with a prompt of more than `longest` tokens.

        Raises:
            EnvError: hardly any prompt is short enough.
        """
        problems: list[Problem] = []
        for _ in range(20):
            problems += self.short(task.sample(rng, n - len(problems)), longest)
            if len(problems) == n:
                return problems
        raise EnvError(
            f"{task.name}: hardly any prompt has at most max_prompt_tokens = {longest} tokens; "
            "raise it"
        )

    def answer(self, text: str) -> np.ndarray:
        """Token ids of a completion and the end token [L] int32."""
        return np.array([*self.tokenizer.encode(text), self.tokenizer.eos_ids[0]], np.int32)

    def demonstrations(self, task: TextTask, problems: Sequence[Problem]) -> Sequences:
        """Right completions to learn from, each with its own prompt."""
        answers = [self.answer(task.demonstrate(problem)) for problem in problems]
        lengths = np.array([len(answer) for answer in answers])
        tokens = np.zeros((len(answers), lengths.max(initial=0)), np.int32)
        for row, answer in zip(tokens, answers):
            row[: len(answer)] = answer
        return Sequences(
            prompts=[self.prompt(problem) for problem in problems],
            prompt_index=np.arange(len(problems)),
            tokens=tokens,
            lengths=lengths,
            mask=np.arange(tokens.shape[1]) < lengths[:, None],
        )
