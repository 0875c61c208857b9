from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from msrl_accel.signals import GracefulStop


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_first_signal_only_asks(name):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with GracefulStop() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), getattr(signal, name))
        assert stop.requested == name
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_second_interrupt_raises_and_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_off_the_main_thread_nothing_changes():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


def test_a_loop_in_another_process_finishes_its_iteration():
    code = """
from msrl_accel.signals import GracefulStop
import time
with GracefulStop() as stop:
    print("ready", flush=True)
    while stop.requested is None:
        time.sleep(0.01)
    print("saved after", stop.requested)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        child.terminate()
        assert child.stdout.read() == "saved after SIGTERM\n"
    assert child.returncode == 0
