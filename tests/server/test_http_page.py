"""The page on HTTP runs as pasted, against a Jupyter server of its own."""

import pages
from real_server import RealServer

PAGE = pages.ROOT / "docs" / "http.md"


def test_the_page_runs_from_top_to_bottom(empty_shell, tmp_path, monkeypatch):
    server = RealServer(tmp_path / "no-driver" / "none.so", tmp_path)
    server.begin()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    try:
        pages.run(PAGE, empty_shell, tmp_path)
    finally:
        log = server.end()
    assert "Traceback" not in log, log
