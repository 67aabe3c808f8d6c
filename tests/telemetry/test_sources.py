"""Who is asked for GPUs, and what an all-smi endpoint tells."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from machines import GIB, radeon_and_apu

from gpumagic.telemetry import Host
from gpumagic.telemetry.all_smi_source import AllSmiSource, samples
from gpumagic.telemetry.collect import Collector, chosen

# As all-smi 0.26 prints it, a little shortened; its older versions said uuid and index.
GAUDI = 'gpu="Intel Gaudi 3",instance="node7",gpu_uuid="01P0-HL3000",gpu_index="0"'
OLDER = 'gpu="NVIDIA \\"H200\\"",instance="node7",uuid="GPU-12345",index="1"'
PAGE = f"""\
# HELP all_smi_gpu_utilization GPU utilization percentage
# TYPE all_smi_gpu_utilization gauge
all_smi_gpu_info{{{GAUDI},type="GPU"}} 1
all_smi_gpu_utilization{{{GAUDI}}} 42.5
all_smi_gpu_memory_used_bytes{{{GAUDI}}} 4294967296
all_smi_gpu_memory_total_bytes{{{GAUDI}}} 137438953472
all_smi_gpu_temperature_celsius{{{GAUDI}}} 51
all_smi_gpu_power_consumption_watts{{{OLDER}}} 400.5
all_smi_gpu_frequency_mhz{{{OLDER}}} NaN
all_smi_gpu_utilization{{gpu="nameless"}} 3
all_smi_process_memory_used_bytes{{pid="7",device_uuid="GPU-12345"}} 5
"""


def names(setting: str, platform: str = "linux") -> tuple[list[str], list[str]]:
    sources, problems = chosen({"GPUMAGIC_SOURCES": setting}, platform)
    return [source.name for source in sources], [problem.cause for problem in problems]


def test_all_that_a_machine_can_have_are_asked() -> None:
    assert names("") == (["nvml", "amd", "intel"], [])
    assert names(" , ") == names("")
    assert names("", "darwin") == (["nvml", "apple"], [])


def test_those_that_are_named_are_asked() -> None:
    assert names("amd") == (["amd"], [])
    assert names("nvml, apple,http://node7:9090/metrics") == (["nvml", "apple", "all-smi"], [])


def test_a_source_of_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("theirs")
    theirs.make = lambda: SimpleNamespace(name="tpu")  # type: ignore[attr-defined]
    theirs.fails = lambda: 1 // 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    assert names("nvml,theirs:make") == (["nvml", "tpu"], [])
    found, (cause,) = names("theirs:fails,nvml")
    assert found == ["nvml"]
    assert "'theirs:fails', which is no source (ZeroDivisionError" in cause


@pytest.mark.parametrize("name", ["rocm", "amd:relative", "nowhere.at.all:make", "nvml:", "a:b c"])
def test_what_is_no_source_is_one_line_of_what_there_is(name: str) -> None:
    sources, (problem,) = chosen({"GPUMAGIC_SOURCES": f"{name},nvml"})
    assert [source.name for source in sources] == ["nvml"]
    assert problem.cause.startswith(f"GPUMAGIC_SOURCES names {name!r}, which is no source")
    assert problem.cure.startswith("there are nvml, amd, intel, apple, an all-smi address")
    assert "\n" not in problem.cause + problem.cure


def test_a_misnamed_source_is_told_and_the_files_of_a_mounted_host_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    radeon_and_apu(tmp_path)
    monkeypatch.setenv("GPUMAGIC_SOURCES", f"amd:{tmp_path},rocm")
    snapshot = Collector(here=list, usable=False).take()
    assert [gpu.vendor for gpu in snapshot.gpus] == ["amd", "amd"]
    assert [problem.code for problem in snapshot.problems] == ["source-unknown"]


def test_what_all_smi_tells() -> None:
    gaudi, other = samples(PAGE)
    assert (gaudi.uuid, gaudi.name, gaudi.vendor, gaudi.index) == (
        "01P0-HL3000",
        "Intel Gaudi 3",
        "intel",
        0,
    )
    assert (gaudi.utilization, gaudi.temperature, gaudi.power) == (42.5, 51.0, None)
    assert (gaudi.memory_used, gaudi.memory_total) == (4 * GIB, 128 * GIB)
    assert (other.uuid, other.index, other.vendor) == ("GPU-12345", 1, "nvidia")
    assert (other.power, other.sm_clock) == (400.5, None)


@pytest.mark.parametrize("text", ["", "<html>", "all_smi_gpu_utilization{} 3", "\0" * 50])
def test_a_page_that_tells_of_no_gpu(text: str) -> None:
    source = AllSmiSource("http://node7/metrics", lambda address: text)
    assert source.gpus(Host()) == []
    (problem,) = source.problems()
    assert problem.cause == "http://node7/metrics tells of no GPU"


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *said: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_and_one_that_does_not_answer(endpoint: str) -> None:
    there, lost = AllSmiSource(f"{endpoint}/metrics"), AllSmiSource(f"{endpoint}/other")
    silent = AllSmiSource("http://127.0.0.1:9/metrics")
    snapshot = Collector([there, lost, silent], here=list, usable=False).take()
    assert (snapshot.source, len(snapshot.gpus)) == ("all-smi", 2)
    first, second = snapshot.problems
    assert "/other does not answer (HTTP Error 404" in first.cause
    assert "127.0.0.1:9/metrics does not answer" in second.cause
    assert "all-smi api --port 9090" in second.cure


def test_an_endpoint_is_asked_as_often_as_it_looks_itself() -> None:
    now, asked = [0.0], []

    def read(address: str) -> str:
        asked.append(now[0])
        return PAGE

    source = AllSmiSource("http://node7/metrics", read, lambda: now[0])
    for _ in range(10):
        source.gpus(Host(), patience=2.0)
        source.chore(processes=False, seconds=0.5)
        now[0] += 1
    assert asked == [0, 3, 6, 9]


def test_two_that_tell_of_one_gpu_are_believed_in_their_order() -> None:
    first = AllSmiSource("http://a", lambda address: PAGE)
    second = AllSmiSource("http://b", lambda address: PAGE.replace(" 42.5", " 7"))
    snapshot = Collector([first, second], here=list, usable=False).take()
    assert [gpu.utilization for gpu in snapshot.gpus] == [42.5, None]
