"""The RAM limit of a container, from folders as Linux makes them."""

import psutil
import pytest

from gpumagic.telemetry.host import MemoryGroup

MIB = 2**20
TOTAL = psutil.virtual_memory().total


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write files of a machine; returns its group."""
    monkeypatch.delenv("GPUMAGIC_CGROUP", raising=False)

    def made(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return MemoryGroup(tmp_path)

    return made


def test_the_smallest_limit_on_the_way_up_counts(machine):
    group = machine(
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": f"{300 * MIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{290 * MIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
            "sys/fs/cgroup/job/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
            "sys/fs/cgroup/memory.max": f"{500 * MIB}\n",
            "proc/vmstat": "oom_kill 9\n",
        }
    )
    assert group.limit() == 300 * MIB
    assert group.ram() == (270 * MIB, 300 * MIB)
    assert group.kills() == 2


def test_in_a_container_the_mount_is_the_group(machine):
    group = machine(
        {
            "proc/self/cgroup": "4:memory:/docker/4f2a\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{300 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{200 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {50 * MIB}\n",
            "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\noom_kill 1\n",
        }
    )
    assert group.ram() == (150 * MIB, 300 * MIB)
    assert group.kills() == 1


def test_without_a_limit_the_machine_counts(machine):
    group = machine(
        {
            "proc/self/cgroup": "4:memory:/\n0::/user.slice\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
            "proc/vmstat": "nr_free_pages 1\noom_kill 9\n",
        }
    )
    assert group.limit() is None
    assert group.ram()[1] == TOTAL
    assert group.kills() == 9


def test_what_is_not_there_is_not_known(machine):
    group = machine({"proc/self/cgroup": "nonsense\n0::/gone\n"})
    assert (group.limit(), group.kills()) == (None, None)


def test_a_named_folder_is_the_group(machine, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/memory.max").write_text(str(MIB))
    monkeypatch.setenv("GPUMAGIC_CGROUP", str(tmp_path / "here"))
    group = MemoryGroup()
    assert group.ram() == (None, MIB)
