"""`%ongpu`: all cells from now on, until it ends."""

import pytest
import torch
from IPython.core.error import UsageError

import gpumagic


def test_standing(ip):
    assert "where their code says" in ip.run("%ongpu").text
    done = ip.run("%ongpu 1\nx = zeros(1)")
    assert "cells run on cuda:1 (virtual) from now on" in done.text
    assert ip.ns["x"].device.index == 1
    ip.run("X = torch.ones(2, device='cpu')")
    assert ip.run("y = X + zeros(2)").text.startswith("cuda:1 (virtual")
    assert ip.ns["y"].device.index == 1
    assert ip.run("z = 1").text == ""  # nothing to do with a device: no line
    assert ip.run("%%ongpu 0\nzeros(1)").result.device.index == 0
    assert "cells run on cuda:1 (virtual)" in ip.run("%ongpu").text
    assert "no longer" in ip.run("%ongpu off\nx = zeros(1)").text
    assert ip.ns["x"].device.type == "cpu"
    assert ip.run("zeros(1)").result.device.type == "cpu"
    assert "%ongpu was not on" in ip.run("%ongpu off").text


def test_a_misspelled_word_asks_what_was_meant(ip):
    assert "type %ongpu home, on a line of its own" in ip.run("%ongpu home --quiet").text
    asked = "%gpuwatch: unexpected onn; did you mean on?"
    assert asked in ip.run("%gpuwatch onn").text


def test_a_standing_placement_whose_device_goes_ends_once(ip):
    ip.run("%ongpu 1")
    ip.run("import gpumagic; gpumagic.virtual.disable()")
    done = ip.run("x = zeros(1)")
    assert isinstance(done.error, UsageError)
    assert done.text.count("\n") == 1
    assert "%ongpu 1 has ended" in done.text
    assert ip.run("x = zeros(1)").success
    gpumagic.virtual.enable(2)


def test_the_last_question_mark_is_no_help_request(ip):
    assert "cells run on cuda:0 (virtual) from now on" in ip.run("%ongpu cuda?").text
    ip.run("%ongpu off")
    assert ip.run("%%ongpu 7?\nzeros(1)").result.device.type == "cpu"
    assert "cpu: asked for GPU 7, which is not here" in ip.run("%%ongpu 7?\nzeros(1)").text


def test_virtual_gpus_turned_off_in_the_middle_end_what_holds(ip):
    ip.run("%ongpu 1")
    done = ip.run("%gpus --virtual off\nx = torch.zeros(1)")
    assert done.success, done.text
    assert done.text == "virtual GPUs are off; %ongpu 1 has ended\n"
    assert ip.ns["x"].device.type == "cpu"
    assert ip.run("torch.zeros(1)").result.device.type == "cpu"
    ip.run("%gpus --virtual 2")
    ip.run("back = torch.ones(2)\nmoved = back")
    done = ip.run("%%ongpu 1\nkept = zeros(1) + moved.sum()\n%gpus --virtual off")
    assert "would leave no GPU for kept; to move everything to the CPU first, type" in done.text
    assert ip.ns["moved"] is ip.ns["back"]
    assert ip.ns["moved"].device.type == "cuda"  # what is refused moves nothing
    done = ip.run("%ongpu 1\n%gpus --virtual off --force\nx = torch.zeros(1) + kept.sum()")
    assert done.success, done.text
    assert "moved moved, kept: 12 B from cuda:1" in done.text
    assert "virtual GPUs are off; %ongpu 1 has ended\n" in done.text
    ip.run("%gpus --virtual 2")
    hidden = "def hidden():\n    x = torch.ones(1, device='cuda')\n    yield x\nhere = hidden()"
    done = ip.run(f"{hidden}\nnext(here)\n%gpus --virtual off --force")
    assert "unusable until virtual GPUs are on again: 1 tensor" in done.text
    ip.run("del here")
    ip.run("%gpus --virtual 2")
    ip.run("a = torch.ones(2, device='cuda')")
    shown = f"Out[{ip.ip.execution_count}]"
    ip.run("torch.ones(3, device='cuda:1')")
    done = ip.run("%gpus --virtual off --force")
    assert f"moved a, {shown}: 20 B" in done.text
    assert done.text.endswith("virtual GPUs are off\n")
    ip.run("%gpus --virtual 2")


def test_a_cell_for_the_cpu_whose_code_names_a_gpu_says_so(ip):
    ip.run("%ongpu off")
    said = "asked for cpu; all arrays that the cell created are on cuda:0"
    assert said in ip.run("%%ongpu cpu\nmade = torch.ones(2**18, device='cuda:0')").text
    assert said not in ip.run("%%ongpu cpu\nmade = torch.ones(2**18)").text
    ip.run("del made")


def test_results_with_a_graph_are_moved_without_it_when_virtual_gpus_are_forced_off(ip):
    ip.run("%ongpu off\nnet, b = torch.nn.Linear(3, 3), torch.ones(2, 3)")
    ip.run("%%ongpu 1\nout = net(b)\nlosses = [out.sum(), out.sum()]")
    ip.run("here = torch.ones(2, device='cpu', requires_grad=True) * 2")
    expected = ip.run("[out.detach().cpu(), losses[0].item()]").result
    assert "out, losses; to move everything" in ip.run("%gpus --virtual off").text
    assert ip.run("net(b).device.type").result == "cuda"
    shown = f"Out[{ip.ip.execution_count}]"
    ip.run("net(b)")
    assert "already on; type %gpus --virtual off --force first" in ip.run("%gpus --virtual 1").text
    done = ip.run("%gpus --virtual off --force")
    assert f"; moved without their graphs: out, losses, {shown}" in done.text
    assert ip.run("losses[0].item()").result == pytest.approx(expected[1])
    torch.testing.assert_close(ip.ns["out"].detach(), expected[0])
    ip.run("%gpus --virtual 2")


def test_what_a_graph_or_an_output_holds_on_virtual_gpus_is_named(ip):
    ip.run("%ongpu off\nnet, b = torch.nn.Linear(3, 3), torch.ones(2, 3)")
    ip.run("%%ongpu 1\nloss = net(b * 2).sum()")
    done = ip.run("loss = loss.cpu()\n%gpus --virtual off")
    assert "would destroy the tensors of loss; type %gpufree" in done.text
    done = ip.run("loss = loss.detach()\n%gpus --virtual off")
    assert "virtual GPUs are off" in done.text
    ip.run("%gpus --virtual 2")


def test_off_in_any_case_and_in_the_wrong_place(ip):
    ip.run("%ongpu 1")
    assert "no longer" in ip.run("%ongpu OFF  # done").text
    assert "type %ongpu off" in ip.run("%%ongpu off\nx = 1").text
    assert ip.run("%ongpu --nope").text.startswith("UsageError: %ongpu: ")
