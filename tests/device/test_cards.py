"""Cards that are not here: by name in the spellings of drivers, shops and people, or by size."""

import pytest

from gpumagic.device.cards import CARDS, Card, bytes_in, card, cards
from gpumagic.errors import GpuError


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("H100 80GB", "H100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("nvidia a100-sxm4-40gb", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("rtx4090", "RTX 4090 24GB"),
        ("4090", "RTX 4090 24GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super 16GB"),
        ("4070 ti", "RTX 4070 Ti 12GB"),
        ("A10G", "A10G 24GB"),
        ("a10", "A10 24GB"),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        ("rtx a6000", "RTX A6000 48GB"),
        ("T4 16 GiB", "T4 16GB"),
    ],
)
def test_a_card_has_many_spellings(given, name):
    assert card(given).name == name


@pytest.mark.parametrize("known", CARDS, ids=lambda c: c.name)
def test_each_is_found_by_its_name_and_is_no_larger_than_that_says(known):
    assert card(known.name) is card(known.name.replace(" ", "-")) is known
    named = int(known.name.rsplit(" ", 1)[1].removesuffix("GB")) * 2**30
    assert 0.9 * named <= known.total <= named
    assert 0 < known.usable < known.total


def test_a_size_is_a_card():
    assert card("24GiB").total == 24 * 2**30
    assert [c.name for c in cards("a100 40gb, 24GiB, A100-40GB")] == ["A100 40GB", "24GiB"]
    assert card("100MiB").usable == 0
    assert bytes_in("2.5 gb") == 2_500_000_000
    assert bytes_in("2.5 apples") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("RTX 4091", "no card 'RTX 4091' is known; did you mean 'RTX 4090 24GB'"),
        (
            " toaster",
            "no card 'toaster' is known; type a name such as H100, 'A100 80GB' or "
            "T4, or a size: 24GiB",
        ),
        ("A100", "A100 may be 'A100 80GB' or 'A100 40GB'; type one of them"),
    ],
)
def test_what_is_not_known_is_one_line(given, said):
    with pytest.raises(GpuError, match=said) as raised:
        card(given)
    assert "\n" not in str(raised.value)


def test_the_workspace_of_cublas_is_what_torch_takes(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert Card("", 0, (9, 0)).workspace == 32 * 2**20
    assert Card("", 0, (8, 0)).workspace == 8 * 2**20 + 128 * 1024
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert Card("", 0, (9, 0)).workspace == 8 * 2**20 + 128 * 1024
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert card("H100 80GB").workspace == 128 * 1024
