"""Help with examples, and Tab."""

import pytest

from gpumagic.magics import arguments


def test_help_teaches_with_examples(ip):
    from IPython.core import oinspect

    info = ip.ip.object_inspect("%%ongpu")
    assert "%%ongpu free" in info["docstring"]
    assert "--no-move" in info["docstring"]
    assert "%gputime cpu 0 -- torch.mm(a, a)" in ip.ip.object_inspect("%%gputime")["docstring"]
    assert "--virtual 2|off" in ip.ip.object_inspect("%gpus")["docstring"]
    assert oinspect  # the inspector that `?` uses


TIMING = {"--sweep", "--setup", "--items", "--max-time", "--output", "--against"}
TIMING |= {"--quiet"}
OPTIONS = {
    "--check",
    "--no-move",
    "--quiet",
    "--dry-run",
    "--report",
    "--strict",
    "--fix",
    "--back",
    "--on",
}
OPTIONS |= {"--memory", "--save", "--profile", "--split", "--gather", "--reduce", "--chunk"}

SEVERAL = {"0,1", "all", "@all"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%ongpu ", {"0", "1", "cuda:0", "cuda:1", "cpu", "free", *OPTIONS, *SEVERAL}),
        ("%%ongpu @", {"@all"}),
        ("%%ongpu 0,", {"0,1", "0,cuda:0", "0,cuda:1", "0,cpu", "0,free"}),
        ("%ongpu ", {"0", "1", "cuda:0", "cuda:1", "cpu", "free", *OPTIONS, "home", "off"}),
        ("%%ongpu cu", {"cuda:0", "cuda:1"}),
        ("%%ongpu cuda:", {"cuda:0", "cuda:1"}),
        ("%%ongpu gpu:", {"gpu:0", "gpu:1"}),
        ("%%ongpu 1 --", OPTIONS),
        ("%%ongpu 1 --no-move --", OPTIONS - {"--no-move"}),
        ("%%ongpu 0,1 --split mo", {"model", "more"}),
        ("%%ongpu 0,1 --gather more,mo", {"more,model"}),
        ("%%gputime ", {"0", "1", "cuda:0", "cuda:1", "cpu", "free", *TIMING}),
        ("%%gputime cpu cu", {"cuda:0", "cuda:1"}),
        ("%%gputime cpu cuda:0 cu", {"cuda:1"}),
        ("%%gputime 0 1 0+", {"0+0", "0+1", "0+cuda:0", "0+cuda:1", "0+cpu", "0+free"}),
        ("%%gputime 0 --quiet --", TIMING - {"--quiet"}),
        ("%gputime 0 --against ", {"last"}),
        ("%%gpufit --on T", {"T4-16GB", "TITAN-RTX-24GB"}),
        ("%%gpufit --on h100", {"h100", "H100-80GB", "H100-NVL-94GB"}),
        ("%%ongpu 0,1 --split more --reduce loss=m", {"loss=mean", "loss=min", "loss=max"}),
        ("%%ongpu 0,1 --split more --reduce more=sum,model=l", {"more=sum,model=last"}),
        ("%%gpudiff fl", {"float16", "float32", "float64"}),
        ("%%gpudiff cpu cu", {"cuda:0", "cuda:1"}),
        ("%gpufree mo", {"model", "more"}),
        ("%gpufree model mo", {"more"}),
        ("%gpuwatch ", {"on", "off", "--report", "--strict", "--check"}),
        ("%ongpu o", {"off"}),
        ("%ongpu h", {"home"}),
        ("%gpus --v", {"--virtual"}),
        ("%gpumem c", {"cuda:0", "cuda:1"}),
        ("%gpus --virtual ", {"1", "2", "4", "8", "off"}),
    ],
)
def test_completion(ip, line, expected):
    ip.ns["model"] = ip.ns["more"] = 1
    found = {text.rpartition(" ")[2] for text in completions(ip, line)}
    assert found == expected


def completions(ip, line):
    from IPython.core.completer import provisionalcompleter

    with provisionalcompleter():
        return {line[: c.start] + c.text for c in ip.ip.Completer.completions(line, len(line))}


def test_what_may_hold_memory_completes(ip):
    ip.run("unusual = zeros(3)\ndef unusual_function(): pass\n_unusual = unusual")
    assert completions(ip, "%gpumem unus") == {"%gpumem unusual"}


def test_other_lines_complete_as_before(ip):
    ip.ns["unusual_name_of_mine"] = 1
    assert "unusual_name_of_mine" in completions(ip, "unusual_na")


def test_after_the_dashes_it_is_python(ip):
    ip.ns["unusual_name_of_mine"] = 1
    found = completions(ip, "%gputime 0 -- unusual_na")
    assert any(text.endswith("unusual_name_of_mine") for text in found)


def test_a_cluster_is_offered_where_there_can_be_one(ip, monkeypatch):
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    assert completions(ip, "%%ongpu a") == {"%%ongpu all"}
    assert not any("@" in text for text in completions(ip, "%%ongpu "))


def test_one_gpu_is_not_several(ip):
    ip.run("%gpus --virtual off\n%gpus --virtual 1")
    assert not completions(ip, "%%ongpu ") & {"%%ongpu all", "%%ongpu 0,1"}
