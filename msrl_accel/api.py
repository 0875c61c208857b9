"""The library from Python, for scripts and notebooks.

::

    from msrl_accel.api import evaluate, load_run, train

    run = train(algo="ppo", env="CartPole-v1")     # with the tuned configuration shipped for it
    run                                            # where it is, and the return it reached
    run.metrics["episode/return"]                  # NumPy array, beside run.metrics["step"]
    run.plot()                                     # the learning curve, a Matplotlib figure
    run.policy.act(observation)                    # one observation or a batch; deterministic
    run.policy.act(observation, deterministic=False)
    evaluate(run, episodes=20).mean

    run = load_run(run.path)                       # the same, in another session

Any key of the configuration is an argument: ``train(algo="ppo", env="Pendulum-v1", seed=1,
total_steps=300_000, ppo={"learning_rate": 1e-3})``. MindSpore is imported when first needed.
"""

from __future__ import annotations

from msrl_accel.evaluate import evaluate
from msrl_accel.run import Run, load_run
from msrl_accel.train import train

__all__ = ["Run", "evaluate", "load_run", "train"]
