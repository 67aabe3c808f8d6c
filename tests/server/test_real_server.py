"""A real server in its own process, and a driver that breaks and heals while it is watched."""

import asyncio
import statistics
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from real_server import RealServer, leave, told

STAND_IN = Path(__file__).parents[1] / "stand_in" / "nvml.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", made, STAND_IN], check=True)
    return made


@pytest.fixture
def server(library, tmp_path):
    made = RealServer(library, tmp_path)
    yield made
    text = made.end()
    assert "gpumagic | extension was successfully loaded" in text
    assert "Traceback" not in text, text
    # How another extension is to be written is no concern of ours.
    warned = [line for line in text.splitlines() if "[W " in line and "ipyparallel" not in line]
    assert warned == [], text


@pytest.fixture
def watch(server):
    """Begin the server; the returned function waits for a snapshot of one client."""

    async def begin(**machine):
        server.change(**machine)
        await asyncio.to_thread(server.begin)
        link = await server.connect(period=0.25, processes=True)
        return link, lambda condition: told(link, condition)

    return begin


def problem(snapshot, code):
    found = [p for p in snapshot["problems"] if p["code"] == code]
    assert all(p["cause"] and p["cure"] for p in found)
    return found[0] if found else None


def well(snapshot):
    return len(snapshot["gpus"]) == 2 and not snapshot["problems"]


def test_a_driver_that_breaks_and_heals(server, watch):
    async def see():
        link, shows = await watch(fail__nvmlInitWithFlags=9)
        await shows(lambda s: problem(s, "driver-not-loaded") and not s["gpus"])
        for changes, code in (
            ({"fail__nvmlInitWithFlags": 18}, "version-mismatch"),
            ({"fail__nvmlInitWithFlags": 0, "gpus": 0}, "no-gpu"),
            ({"gpus": 2}, None),
            ({"gpu__1__lost": 2}, "gpu-lost"),
            ({"gpu__1__lost": 0}, None),
            ({"fail__*": 999}, "unknown-error"),
            ({"fail__*": 0}, None),
            ({"fail__*": 18}, "version-mismatch"),
            ({"fail__*": 0}, None),
        ):
            server.change(**changes)
            # Who calls the doctor does not wait for the next attempt.
            assert await asyncio.to_thread(server.get, "gpumagic/api/doctor")
            await shows(well if code is None else lambda s, code=code: problem(s, code))
        of_mig = f"{server.process.pid}:5,999999999:7"
        server.change(gpu__0__mig=2, gpu__0__mig1__compute=of_mig, gpu__0__compute=of_mig)
        await asyncio.to_thread(server.get, "gpumagic/api/doctor")
        snapshot = await shows(lambda s: len(s["gpus"]) == 4 and s["processes"])
        mig = [gpu for gpu in snapshot["gpus"] if gpu["mig"]][1]
        found = [(p["uuid"], p["memory"], p["user"] is None) for p in snapshot["processes"]]
        assert found == [(mig["uuid"], 5, False), (mig["uuid"], 7, True)]
        await leave(link)

    asyncio.run(see())


def test_a_stall_holds_nobody_up_and_ends(server, watch):
    async def see():
        link, shows = await watch(gpus=2)
        await shows(well)
        began = time.monotonic()
        # Longer than a busy machine takes to get to the line that ends it.
        server.change(stall__nvmlDeviceGetUtilizationRates=120)
        stalled = await shows(lambda s: problem(s, "stalled"))
        assert all(gpu["age"] > 0 and gpu["memory_used"] for gpu in stalled["gpus"])
        took = []
        for _ in range(50):
            asked = time.perf_counter()
            await asyncio.to_thread(server.get, "api/status")
            took.append(time.perf_counter() - asked)
        assert statistics.median(took) < 0.5, took
        for route in ("snapshot", "history"):
            await asyncio.to_thread(server.get, f"gpumagic/api/{route}")
        server.change(stall__nvmlDeviceGetUtilizationRates=0)
        back = await shows(well)
        assert all(gpu["age"] == 0 for gpu in back["gpus"])
        assert time.monotonic() - began < 100
        await leave(link)

    asyncio.run(see())


def test_a_server_stops_at_once_with_clients_and_a_driver_that_stalls(server, watch):
    async def see():
        link, shows = await watch(gpus=2)
        links = [link] + [await server.connect(period=0.25) for _ in range(20)]
        await shows(well)
        server.change(**{"stall__*": 600})
        await shows(lambda s: problem(s, "stalled"))
        began = time.monotonic()
        server.process.terminate()
        await asyncio.to_thread(psutil.Process(server.process.pid).wait, 20)
        # Two seconds are left to the driver.
        assert time.monotonic() - began < 15
        for link in links:
            await leave(link)

    asyncio.run(see())
