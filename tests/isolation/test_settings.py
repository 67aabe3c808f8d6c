"""What code sets is put back; what a library sets when it is imported stays."""

import os
import sys
import types
import warnings

import numpy
import pytest
import torch

from gpumagic.isolation.settings import kept


def test_all_is_put_back_after_an_exception(tmp_path):
    folder, how = os.getcwd(), numpy.geterr()
    threads = torch.get_num_threads()

    def change():
        os.chdir(tmp_path)
        numpy.seterr(all="raise")
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_default_device("meta")
        torch.set_num_threads(threads + 1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), kept():
        change()
    assert (os.getcwd(), numpy.geterr()) == (folder, how)
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_num_threads() == threads


def test_filters_of_warnings_are_put_back_but_not_those_of_an_import(monkeypatch):
    with warnings.catch_warnings():
        before = warnings.filters[:]
        with kept():
            warnings.simplefilter("error", ResourceWarning)
        assert warnings.filters == before
        with kept():
            warnings.simplefilter("error", ResourceWarning)
            monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
        assert warnings.filters != before
