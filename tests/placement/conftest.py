"""What the tests of placement share."""

import pytest


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder that is a library's: what is imported from there is not the user's."""
    folder = tmp_path / "lib" / "python3" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)
    return folder
