from __future__ import annotations

import pytest

from msrl_accel.errors import PipelineError
from msrl_accel.pipeline.memory import MemoryWatch, container_usage, memory_usage


class Host:
    """Memory in use, a queue that can be halved twice, a clock."""

    def __init__(self, usage):
        self.usage = list(usage)
        self.queue = 4
        self.now = 0.0

    def shrink(self):
        if self.queue == 1:
            return ""
        self.queue //= 2
        return f"queue {self.queue}"

    def watch(self):
        return MemoryWatch(
            self.shrink,
            lambda: self.usage.pop(0) if len(self.usage) > 1 else self.usage[0],
            self.tick,
        )

    def tick(self):
        self.now += 1.0
        return self.now


def test_below_the_watermark_nothing_happens(caplog):
    host = Host([0.1, 0.89])
    watch = host.watch()
    for _ in range(3):
        watch.check()
    assert host.queue == 4
    assert caplog.text == ""
    assert watch.share == 0.89


def test_above_it_the_queue_shrinks_with_a_warning_each_time_and_the_run_goes_on(caplog):
    host = Host([0.93])
    watch = host.watch()
    for _ in range(20):
        watch.check()
    assert host.queue == 1
    assert "memory: 93 % in use (watermark 90 %): queue 2" in caplog.text
    assert "queue 1" in caplog.text
    assert len(caplog.records) == 2


def test_when_that_was_not_enough_it_ends_clearly():
    host = Host([0.98])
    watch = host.watch()
    watch.check()
    watch.check()
    with pytest.raises(PipelineError, match=r"98 % in use with queues as small.*pipeline.workers"):
        watch.check()


def test_a_moment_of_need_does_not_end_the_run():
    host = Host([0.99, 0.99, 0.99, 0.99, 0.99, 0.5])
    watch = host.watch()
    for _ in range(5):
        watch.check()
    assert watch.share == 0.5


def test_this_host_has_memory_in_use():
    assert 0 < memory_usage() < 1


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts_without_pages_that_can_be_dropped(tmp_path, version):
    names = {
        1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
        2: ("memory.max", "memory.current", "memory.stat"),
    }[version]
    stat = "anon 1\ninactive_file 300\ntotal_inactive_file 300\n"
    for name, text in zip(names, ("1000\n", "950\n", stat)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_usage(tmp_path) == pytest.approx(0.65)
    (tmp_path / names[0]).write_text({1: "9223372036854771712", 2: "max"}[version])
    assert container_usage(tmp_path) == 0
    assert container_usage(tmp_path / "nowhere") == 0
