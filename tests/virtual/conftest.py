from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpumagic import virtual  # noqa: E402

CAPACITY = 2 * 2**30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    real = "virtual GPUs are not turned on where there is a real one"
    for item in items:
        if here in item.path.parents and torch.cuda.device_count() and not virtual.enabled():
            item.add_marker(pytest.mark.skip(reason=real))


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State files and environment of this test alone, and no virtual GPUs before or after it."""
    monkeypatch.setenv("GPUMAGIC_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("GPUMAGIC_VIRTUAL", raising=False)
    assert not virtual.enabled()
    return tmp_path / "virtual"


@pytest.fixture
def gpus(runtime: Path, kept_kernels: None) -> Iterator[Any]:
    """Two virtual GPUs of 2 GiB."""
    virtual.enable(2, CAPACITY)
    yield virtual
    torch.set_default_device(None)
    virtual.disable()


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    """Equal bit for bit, wherever they lie, in lists and tuples too."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        a, b = (x.detach().cpu().resolve_conj() for x in (a, b))
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        return a.dtype == b.dtype and torch.equal(a, b)

    return same
