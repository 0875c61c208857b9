"""Two processes under msrun take the steps of one on the whole batch."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import parallel_helpers
import pytest
from run_helpers import environment

from msrl_accel.parallel.launch import available

pytestmark = [
    pytest.mark.skipif(not available(), reason="msrun is missing"),
    pytest.mark.slow,
]


def two_processes(folder, accumulate):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = environment()
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    flags = ["--worker_num=2", "--local_worker_num=2", f"--master_port={port}", "--join=True"]
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run", *flags]
    command += [f"--log_dir={folder / 'logs'}", parallel_helpers.__file__]
    done = subprocess.run(
        [*command, str(folder), str(accumulate)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    logs = [f.read_text() for f in sorted((folder / "logs").glob("worker_*.log"))]
    assert done.returncode == 0, done.stderr[-2000:] + "\n".join(log[-2000:] for log in logs)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    from msrl_accel.algorithms.ppo import PPO
    from msrl_accel.device import set_up

    h = parallel_helpers
    config = h.config(h.ENVS, h.STEPS * h.ENVS, target_kl=0.05)
    set_up(config.runtime)
    return h.train(PPO(config, h.spec()), slice(None))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_take_the_steps_of_one(tmp_path, alone, accumulate):
    ranks = two_processes(tmp_path, accumulate)
    for rank in ranks:
        # Moment 1 is a tenth of the clipped gradient after one step; 1e-7 is 1e-6 of the gradient.
        np.testing.assert_allclose(rank["moment0"], alone["moment0"], rtol=0, atol=1e-7)
        for name, expected in alone.items():
            np.testing.assert_allclose(rank[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(
            rank["gathered"], [[1e9 + 1 / 3, np.nan, 0], [1e9 + 1 / 3, np.nan, 1]]
        )
        assert rank["most"] == 8
    for name in alone:
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name], err_msg=name)
