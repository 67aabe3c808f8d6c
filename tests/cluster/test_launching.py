"""Start engines as Slurm and SSH do, on this machine; and see who may reach them."""

import asyncio
import gc
import getpass
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import ipyparallel
import psutil
import pytest

import gpumagic
from gpumagic import GpuError, device
from gpumagic.cluster import gpu_cluster, launching
from gpumagic.device import Device, TorchBuild

STAND_IN = Path(__file__).parents[1] / "stand_in" / "slurm"
_WHO = (
    "import os, torch, torch.distributed as dist\n"
    "a = torch.ones(1)\ndist.all_reduce(a)\n(dist.get_rank(), a.item(), os.environ['LOCAL_RANK'])"
)


def mark():
    return gpu_cluster.current()._engines.mark


def whole(ranks):
    """The values of a cell that needs all ranks."""
    return ranks.run(_WHO, quiet=True)[0]


def test_each_rank_is_shown_its_gpu_by_the_variable_that_its_torch_reads(monkeypatch):
    there = [Device("cuda", n, f"GPU-{n}a5f") for n in range(2)]
    monkeypatch.setattr(device, "here", lambda memory=True: there)
    for build, name in (
        (TorchBuild(cuda="13.0"), "CUDA_VISIBLE_DEVICES"),
        (TorchBuild(hip="6.2"), "ROCR_VISIBLE_DEVICES"),
    ):
        monkeypatch.setattr(device, "torch_build", lambda build=build: build)
        plan = launching.local("2")
        assert [each.environment[name] for each in plan.sets] == ["GPU-0a5f", "GPU-1a5f"]
        for no_gpu in ("cpu", "9?"):
            with pytest.raises(GpuError, match="type 0, 1"):
                launching.local(no_gpu)


def test_too_many_virtual_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(launching.device, "here", lambda memory: [])
    assert launching.local("1").description == "1 virtual GPU of this machine"
    assert launching.local("0,1").count == launching.local("0, 1").count == 2
    with pytest.raises(gpumagic.GpuError, match="GPU-4f is no number, and no GPU is here; type"):
        launching.local("GPU-4f")
    for where in ("65", "99"):
        with pytest.raises(gpumagic.GpuError, match=f"{where} engines: there can be 1 to 64 e"):
            launching.local(where)
    with pytest.raises(gpumagic.GpuError, match="0 engines: there can be 1 to 64 engines, one"):
        launching.local("0")


def test_a_name_that_is_loopback_is_not_given_to_other_machines(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "127.0.1.1")
    monkeypatch.setattr("jupyter_client.localinterfaces.public_ips", lambda: ["10.1.2.3"])
    plan = launching.slurm("2x8", None, None)
    assert (plan.address, plan.local) == ("10.1.2.3", False)


def test_each_way_to_start_has_a_plan(monkeypatch):
    plan = launching.slurm("2x8", "gpu", "10.0.0.1")
    assert (plan.launcher, plan.count, plan.address, plan.local) == ("slurm", 16, "10.0.0.1", False)
    assert plan.sets[0].options["options"].splitlines() == [
        f"#SBATCH --{line}" for line in ("nodes=2", "ntasks=16", "gpus-per-node=8", "partition=gpu")
    ]
    plan = launching.ssh("me@one,localhost:2", "10.0.0.1", "/opt/python")
    assert [each.options["engines"] for each in plan.sets] == [
        {"me@one": 1},
        {"localhost": 1},
        {"localhost": 1},
    ]
    assert [each.environment["RANK"] for each in plan.sets] == ["0", "1", "2"]
    assert plan.sets[0].options["engine_cmd"][0] == "/opt/python"
    assert launching.ssh("localhost:2", None, None).local
    for wrong in (
        lambda: launching.slurm("8", None, None),
        lambda: launching.ssh("host:x", None, None),
        lambda: launching.ssh("host:0", None, None),
        lambda: launching.ssh("host,me@host", None, None),
    ):
        with pytest.raises(GpuError, match="; type --"):
            wrong()


_INHERITED = {"RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
_IN_SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "5"}
_BY = {
    "slurm": {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
}


@pytest.mark.parametrize("inherited", [_INHERITED, _IN_SLURM, _INHERITED | _IN_SLURM])
@pytest.mark.parametrize(
    ("plan", "launcher", "gpu"),
    [
        (launching.ssh("one,two", "10.0.0.1", None), {}, "0"),
        (launching.ssh("one:2", "10.0.0.1", None), {}, "1"),
        (launching.slurm("1x2", None, "10.0.0.1"), _BY["slurm"], "1"),
    ],
)
def test_a_rank_is_told_by_its_launcher_and_not_by_what_the_kernel_inherited(
    plan, launcher, gpu, inherited
):
    """A kernel may run under torchrun, or in a job of Slurm."""
    its = {**inherited, **plan.environment, **plan.sets[-1].environment, **launcher}
    launching.take_place(its)
    assert (its["RANK"], its["LOCAL_RANK"], its["WORLD_SIZE"]) == ("1", "0", "2")
    assert its["CUDA_VISIBLE_DEVICES"] == gpu
    assert its.get("LOCAL_WORLD_SIZE", "1") == "1"


@pytest.mark.parametrize(
    ("plan", "launcher", "threads"),
    [
        (launching.ssh("a:1,b,c:1,d:4", "10.0.0.1", None), {}, ["16", "16", "16", *["4"] * 4]),
        (launching.slurm("2x4", None, "10.0.0.1"), _BY["slurm"], ["4"]),
    ],
)
def test_the_ranks_of_a_host_share_its_cores(monkeypatch, plan, launcher, threads):
    there = [{**plan.environment, **each.environment, **launcher} for each in plan.sets]
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for its in there:
        launching.take_place(its)
    assert [its["OMP_NUM_THREADS"] for its in there] == threads


@pytest.mark.parametrize("inherited", [_INHERITED, _IN_SLURM])
def test_a_rank_without_a_gpu_sees_none_in_a_job_either(monkeypatch, inherited):
    monkeypatch.setattr(launching.device, "here", lambda memory: [])
    plan = launching.local("2")
    its = {**inherited, **plan.environment, **plan.sets[1].environment}
    launching.take_place(its)
    assert (its["RANK"], its["CUDA_VISIBLE_DEVICES"]) == ("1", "")


def test_nothing_listens_beyond_loopback(ranks):
    processes = [psutil.Process(), *launching.marked(mark())]
    addresses = set()
    for process in processes:
        for each in process.net_connections(kind="inet"):
            if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM:
                addresses.add(each.laddr.ip)
    assert len(processes) >= 6
    assert addresses <= {"127.0.0.1", "::1"}
    assert "127.0.0.1" in addresses


def test_who_is_not_the_user_has_no_key_and_without_it_nothing_is_answered(ranks):
    directory = Path(gpu_cluster.current()._engines._directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    [file] = directory.glob("security/*-client.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for process in launching.marked(mark()):
        assert "key" not in " ".join(process.cmdline())
    ipyparallel.Client(str(file), timeout=30).close()
    other = file.with_name("other.json")
    text = file.read_text()
    key = json.loads(text)["key"]
    other.write_text(text.replace(key, key[::-1]))
    try:
        with pytest.raises(TimeoutError):
            ipyparallel.Client(str(other), timeout=1)
    finally:
        other.unlink()
    assert ranks.run("1", quiet=True)[0] == [1, 1]


@pytest.mark.slow
def test_stopped_clusters_leave_no_open_files_and_no_threads(no_ranks):
    async def started_and_stopped():
        """Start and stop a cluster where a loop runs, as in a kernel."""
        gpumagic.cluster(1).stop()
        await asyncio.sleep(1)  # ipyparallel's threads notice that their process has ended
        return psutil.Process().num_fds(), psutil.Process().num_threads()

    gc.disable()
    try:
        before, *after = (asyncio.run(started_and_stopped()) for _ in range(3))
    finally:
        gc.enable()
    assert [count for count in after if count[0] > before[0] or count[1] > before[1]] == []


@pytest.mark.slow
def test_slurm(no_ranks, monkeypatch, tmp_path, shell):
    monkeypatch.setenv("PATH", f"{STAND_IN}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = shell.run("%gpucluster start --slurm 1x2 --ip 127.0.0.1")
    assert result.error is None, result.text
    assert "2 engines started by Slurm" in result.text
    ranks, its = gpu_cluster.current(), mark()
    assert [tuple(each) for each in whole(ranks)] == [(0, 2, "0"), (1, 2, "0")]
    assert not [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    refused = shell.run("%gpucluster restart 1").text
    assert "rank 1 cannot be replaced alone: slurm started it with others" in refused
    assert shell.run("%gpucluster stop").error is None
    assert launching.marked(its) == []
    assert not [path.name for path in tmp_path.iterdir() if "gpumagic" in path.name]


SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@pytest.fixture
def reached_by_ssh(tmp_path, monkeypatch):
    """An sshd of this user on loopback, and an `ssh` and `scp` on PATH that know its key."""
    port = _free_port()
    for name in ("host", "user"):
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(made, check=True)
    (tmp_path / "user.pub").rename(tmp_path / "authorized")
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\n"
        f"AuthorizedKeysFile {tmp_path}/authorized\nStrictModes no\nUsePAM no\n"
        f"PidFile {tmp_path}/pid\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
    )
    options = f"-i {tmp_path}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q"
    for name, port_option in (("ssh", "-p"), ("scp", "-P")):
        real = shutil.which(name)
        (tmp_path / name).write_text(
            f'#!/bin/sh\nexec {real} {options} {port_option} {port} "$@"\n'
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(tmp_path / "config")])
    while subprocess.run(["ssh", "127.0.0.1", "true"], check=False).returncode:
        assert daemon.poll() is None
        time.sleep(0.1)
    yield
    daemon.terminate()
    daemon.wait()


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(SSHD is None, reason="needs sshd")
def test_ssh(no_ranks, reached_by_ssh, tmp_path, shell):
    """Python there is one that finds this gpumagic: nothing else of here is in its environment."""
    python = tmp_path / "python"
    root = Path(gpumagic.__file__).parents[1]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    host = f"{getpass.getuser()}@127.0.0.1:2"
    result = shell.run(f"%gpucluster start --ssh {host} --python {python}")
    assert result.error is None, result.text
    ranks, its = gpu_cluster.current(), mark()
    assert [tuple(each) for each in whole(ranks)] == [(0, 2, "0"), (1, 2, "0")]
    result = shell.run("%gpucluster restart 1")
    assert result.error is None, result.text
    assert [tuple(each) for each in whole(ranks)] == [(0, 2, "0"), (1, 2, "0")]
    assert shell.run("%gpucluster stop").error is None
    assert launching.marked(its) == []
