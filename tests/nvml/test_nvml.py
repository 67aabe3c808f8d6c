"""The door to NVML, with a library that is a few lines of Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpumagic.nvml import Nvml


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Library:
    """One GPU, whose answers a test sets; an int is NVML's return code."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "nvmlInitWithFlags": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlDeviceGetUUID": lambda handle: "GPU-1",
            "nvmlDeviceGetName": lambda handle: "H100",
            "nvmlDeviceGetMigMode": lambda handle: [0, 0],
            "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(
                total=9, free=4
            ),
        }
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        try:
            answer = self.answers[name]
        except KeyError:
            raise AttributeError(name) from None

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if isinstance(answer, int):
                raise NVMLError(answer)
            return answer(*arguments) if callable(answer) else answer

        return call


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(library: Library, clock: Clock) -> Nvml:
    return Nvml(library, clock)


def test_starts_at_the_first_question_and_once(door: Nvml, library: Library) -> None:
    assert library.calls == []
    for _ in range(3):
        (gpu,) = door.gpus()
    assert (gpu.uuid, gpu.name, gpu.memory_total) == ("GPU-1", "H100", 9)
    assert library.calls.count("nvmlInitWithFlags") == 1
    assert library.calls.count("nvmlDeviceGetHandleByIndex") == 1


def test_a_failed_start_is_retried_after_a_pause(
    door: Nvml, library: Library, clock: Clock
) -> None:
    library.answers["nvmlInitWithFlags"] = 9
    tried_at = []
    for tenths in range(220):
        clock.now = tenths / 10
        before = len(library.calls)
        assert door.gpus() == ()
        if len(library.calls) > before:
            tried_at.append(clock.now)
    assert tried_at == [0, 5, 10, 15, 20]
    assert door.fault is not None
    assert door.fault.code == "driver-not-loaded"
    library.answers["nvmlInitWithFlags"] = None
    clock.now = 1000
    assert len(door.gpus()) == 1
    assert door.fault is None


def test_an_unsupported_question_is_asked_once_of_a_gpu_that_answers_others(
    door: Nvml, library: Library
) -> None:
    library.answers |= {"nvmlA": 3, "nvmlB": lambda handle: 7}
    (gpu,) = door.gpus()
    for _ in range(3):
        assert door.ask(gpu, {"a": ("nvmlA",), "b": ("nvmlB",)}) == {"a": None, "b": 7}
    assert library.calls.count("nvmlA") == 1
    assert library.calls.count("nvmlB") == 3


def test_nothing_is_learnt_from_an_answer_in_which_everything_failed(
    door: Nvml, library: Library
) -> None:
    library.answers |= {"nvmlA": 3, "nvmlB": 3}
    (gpu,) = door.gpus()
    questions = {"a": ("nvmlA",), "b": ("nvmlB",)}
    assert door.ask(gpu, questions) == {"a": None, "b": None}
    library.answers |= {"nvmlA": lambda handle: 1, "nvmlB": lambda handle: 2}
    assert door.ask(gpu, questions) == {"a": 1, "b": 2}


def test_the_same_function_with_other_arguments_is_another_question(
    door: Nvml, library: Library
) -> None:
    def clock_of(handle: str, kind: int) -> int:
        if kind == 0:
            raise NVMLError(3)
        return 1980

    library.answers["nvmlClock"] = clock_of
    (gpu,) = door.gpus()
    questions = {"graphics": ("nvmlClock", 0), "sm": ("nvmlClock", 1)}
    assert door.ask(gpu, questions) == {"graphics": None, "sm": 1980}
    assert door.ask(gpu, questions) == {"graphics": None, "sm": 1980}
    assert library.calls.count("nvmlClock") == 3


def test_a_zero_is_an_answer(door: Nvml, library: Library) -> None:
    library.answers |= {"nvmlZero": lambda handle: 0, "nvmlA": 3}
    (gpu,) = door.gpus()
    assert door.ask(gpu, {"zero": ("nvmlZero",), "a": ("nvmlA",)})["zero"] == 0
    door.ask(gpu, {"zero": ("nvmlZero",), "a": ("nvmlA",)})
    assert library.calls.count("nvmlA") == 1


def test_a_lost_gpu_gets_a_new_handle_at_the_next_question(door: Nvml, library: Library) -> None:
    (gpu,) = door.gpus()
    library.answers["nvmlA"] = 15
    assert door.ask(gpu, {"a": ("nvmlA",)}) == {"a": None}
    assert door.lost["GPU-1"].code == "gpu-lost"
    door.gpus()
    assert library.calls.count("nvmlDeviceGetHandleByIndex") == 2
    assert door.lost == {}


def test_memory_total_zero_is_no_memory(door: Nvml, library: Library) -> None:
    library.answers["nvmlDeviceGetMemoryInfo"] = lambda *_: SimpleNamespace(total=0, free=0)
    (gpu,) = door.gpus()
    assert gpu.memory_total is None
    assert door.memory_free() == {}


@pytest.mark.parametrize("missing", ["nvmlMemory_v2", "nvmlInitWithFlags"])
def test_another_module_of_the_same_name_is_told(missing: str) -> None:
    module = SimpleNamespace(
        __file__="/somewhere/pynvml.py",
        nvmlMemory_v2=2,
        nvmlInitWithFlags=None,
        nvmlDeviceGetMigMode=None,
        NVMLError=NVMLError,
    )
    delattr(module, missing)
    door = Nvml(module)
    assert door.gpus() == ()
    assert door.fault is not None
    assert door.fault.code == "pynvml-clash"
    assert "/somewhere/pynvml.py" in door.fault.cause


def test_no_module_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    door = Nvml()
    assert door.gpus() == ()
    assert door.fault is not None
    assert door.fault.code == "pynvml-clash"
    assert "pynvml" in door.fault.cause.partition("(")[2]
    assert door.system("nvmlSystemGetDriverVersion") is None


def test_of_a_gpu_that_has_just_answered_even_a_lone_question_is_learnt(
    door: Nvml, library: Library
) -> None:
    library.answers["nvmlA"] = 3
    (gpu,) = door.gpus()
    for _ in range(3):
        assert door.ask(gpu, {"a": ("nvmlA",)}, alive=True) == {"a": None}
    assert library.calls.count("nvmlA") == 1


def test_what_was_learnt_is_forgotten_with_the_driver(
    door: Nvml, library: Library, clock: Clock
) -> None:
    library.answers |= {"nvmlA": 3, "nvmlDeviceGetCount": lambda: 1}
    (gpu,) = door.gpus()
    door.ask(gpu, {"a": ("nvmlA",)}, alive=True)
    library.answers["nvmlDeviceGetCount"] = 9
    clock.now = 100
    assert door.gpus() == ()
    library.answers |= {"nvmlA": lambda handle: 5, "nvmlDeviceGetCount": lambda: 1}
    clock.now = 200
    (gpu,) = door.gpus()
    assert door.ask(gpu, {"a": ("nvmlA",)}, alive=True) == {"a": 5}


def test_a_gpu_that_answers_nothing_is_told_until_it_answers(door: Nvml, library: Library) -> None:
    (gpu,) = door.gpus()
    library.answers["nvmlA"] = 999
    door.ask(gpu, {"a": ("nvmlA",)})
    assert door.silent["GPU-1"].code == "gpu-silent"
    assert "error 999" in door.silent["GPU-1"].cause
    library.answers["nvmlA"] = lambda handle: 1
    door.ask(gpu, {"a": ("nvmlA",)})
    assert door.silent == {}


def test_a_lost_gpu_is_known_as_it_was(door: Nvml, library: Library, clock: Clock) -> None:
    door.gpus()
    library.answers["nvmlDeviceGetHandleByIndex"] = 15
    clock.now = 100
    assert door.gpus() == ()
    (gone,) = door.gone
    assert (gone.uuid, gone.name, gone.index) == ("GPU-1", "H100", 0)


def test_xids_without_pynvmls_events_are_none(door: Nvml, library: Library) -> None:
    door.gpus()
    for _ in range(9):
        assert door.xids() == []
    library.answers["nvmlEventSetCreate"] = 3
    assert door.xids() == []
    assert library.calls.count("nvmlEventSetCreate") == 0, "it was tried often enough"


def test_who_looks_again_does_not_wait_for_the_pause_to_end(door: Nvml, library: Library) -> None:
    library.answers["nvmlInitWithFlags"] = 9
    assert door.gpus() == ()
    library.answers["nvmlInitWithFlags"] = None
    assert door.gpus() == ()
    door.retry()
    assert len(door.gpus()) == 1
    assert door.fault is None
