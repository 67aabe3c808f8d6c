"""Let what looks through memory meet what a notebook's process has, and not all tests."""

import pytest


@pytest.fixture(autouse=True)
def _as_in_a_notebook(as_in_a_notebook):
    pass
