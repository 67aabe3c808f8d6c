"""A notebook that a dry run must leave as it is."""

import pytest
import torch


@pytest.fixture
def notebook(ip, tmp_path, monkeypatch):
    """The shell, with variables; afterwards each name refers to what it did."""
    monkeypatch.chdir(tmp_path)
    ip.run(
        "import torch.nn.functional as F, numpy as np, os, random\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "torch.manual_seed(0)\n"
        "X = torch.randn(64, 20); y = torch.randint(0, 5, (64,))\n"
        "net = nn.Linear(20, 5); opt = torch.optim.Adam(net.parameters())\n"
        "log = []; arr = np.ones(3, dtype=np.float32)\n"
        "it = (i for i in range(3))\n"
        "loader = DataLoader(TensorDataset(X, y), batch_size=16, shuffle=True)"
    )
    before = {name: value for name, value in ip.ns.items() if not name.startswith("_")}
    counters = [torch.cuda.memory_stats(i) for i in range(2)]
    random_state = torch.get_rng_state()
    yield ip
    now = {name: value for name, value in ip.ns.items() if not name.startswith("_")}
    assert list(now) == list(before)
    assert all(now[name] is before[name] for name in now)
    assert [torch.cuda.memory_stats(i) for i in range(2)] == counters
    assert torch.equal(torch.get_rng_state(), random_state)
    assert ip.ns["log"] == []
    assert not ip.ns["opt"].state
    assert ip.ns["X"].device.type == "cpu"
    assert list(tmp_path.iterdir()) == []
