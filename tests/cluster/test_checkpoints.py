"""Save variables of two real ranks, lose one, and load them, into other numbers of ranks too."""

import re
import subprocess
import sys
import textwrap

import pytest

from gpumagic.cluster.checkpoints import find
from gpumagic.errors import GpuError

MAKE = """%%ongpu @all
import os, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).cuda()
opt = torch.optim.AdamW(net.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
step, losses, mean = 0, [], torch.zeros(4)
"""
TRAIN = """
for _ in range(3):
    torch.manual_seed(step)
    opt.zero_grad()
    loss = net(torch.randn(5, 8)).square().mean()
    loss.backward()
    opt.step()
    scheduler.step()
    step += 1
    losses.append(loss.item())
    mean.add_(loss.item())
(step, losses, mean.tolist(), [p.tolist() for p in net.state_dict().values()])
"""
NAMES = "net,opt,scheduler,step,losses,mean"


@pytest.fixture
def out(ranks, shell):
    """Run a cell that must end well, on all ranks where it is not a magic's line."""

    def run(cell):
        result = shell.run(cell if cell.startswith("%") else f"%%ongpu @all\n{cell}")
        assert result.error is None, result.text
        return result

    return run


def test_what_was_lost_comes_back_and_training_goes_on_as_if_nothing_had_been(
    out, shell, ranks, tmp_path
):
    out(MAKE)
    early, late = tmp_path / "early", tmp_path / "late"
    text = out(f"%gpucluster checkpoint {NAMES} --to {early}").text
    assert text.strip() == f"net, opt, scheduler, step and 2 more saved to {early / '000001'}"
    out(TRAIN)
    out(f"%gpucluster checkpoint {NAMES} --to {late}")
    whole = out(TRAIN).result
    assert whole[0] == whole[1]
    shell.run("%%ongpu @1\nos.kill(os.getpid(), 9)")
    out("%gpucluster restart 1")
    refused = shell.run(f"%gpucluster restore {late}").text
    assert "rank 1: no variable net; read or assign it in a cell" in refused
    out(MAKE)
    shell.ns["step"] = 100  # the notebook's own
    text = out(f"%gpucluster restore {late}").text
    assert text.strip().endswith(f"loaded from {late / '000001'}")
    assert out(TRAIN).result == whole
    # From before the first step, into an optimizer that has made some.
    out(f"%gpucluster restore {early}")
    out(TRAIN)
    assert out(TRAIN).result == whole


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written_or_changed(
    out, shell, tmp_path
):
    out(
        "import torch\nfrom torch import nn\nnet = nn.Linear(4, 2)\n"
        "opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)\n"
        "items = (n for n in range(3))\nx = torch.ones(2)\nmine = torch.ones(1) * dist.get_rank()\n"
        "odd = torch.ones(1 + dist.get_rank())"
    )

    def refused(line):
        result = shell.run(f"%gpucluster {line}")
        assert result.error is not None
        assert "\n" not in result.text.strip()
        return result.text

    to = f"--to {tmp_path / 'no'}"
    assert "items is a generator, which cannot be saved" in refused(f"checkpoint x,items {to}")
    assert "no variable y; read or assign it in a cell" in refused(f"checkpoint x,y {to}")
    assert "odd: the shapes are not the same on all ranks" in refused(f"checkpoint odd {to}")
    assert "and a directory; type %gpucluster checkpoint net --to" in refused("checkpoint net")
    assert not (tmp_path / "no").exists()
    assert "there is no complete checkpoint" in refused(f"restore {tmp_path}")

    out("net(x.new_ones(1, 4)).sum().backward()\nopt.step()")
    out(f"%gpucluster checkpoint x,net,opt {to}")
    out("opt = torch.optim.SGD(net.parameters(), 0.1)")
    out(f"%gpucluster restore {tmp_path / 'no'}")  # with its options, too
    assert out("opt.param_groups[0]['momentum'], len(opt.state)").result == [(0.9, 2)] * 2
    out("opt = torch.optim.SGD([net.bias, net.weight], 0.1)")
    assert "opt: its class, shapes or groups differ" in refused(f"restore {tmp_path / 'no'}")
    out("opt = torch.optim.SGD([{'params': [each]} for each in net.parameters()], 0.1)")
    out("x += 5")
    assert "opt: its class, shapes or groups differ" in refused(f"restore {tmp_path / 'no'}")
    assert out("float(x[0])").result == [6.0, 6.0]  # nothing was loaded
    out("opt = torch.optim.AdamW(net.parameters())")
    assert "opt: its class, shapes or groups differ" in refused(f"restore {tmp_path / 'no'}")
    remake = "opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)"
    out(f"x = torch.zeros(2)\nnet = nn.Linear(4, 3)\n{remake}")
    wrong = refused(f"restore {tmp_path / 'no'}")
    assert re.search(r"Size mismatch between saved.*\[2.*\[3.* for net/(weight|bias)", wrong)
    out("net = nn.Linear(4, 2, bias=False)\n" + remake)
    assert "the checkpoint's bias does not exist here" in refused(f"restore {tmp_path / 'no'}")
    assert out("len(opt.state)").result == [0, 0]
    out("net = opt = 3")
    assert "the checkpoint's bias does not exist here" in refused(f"restore {tmp_path / 'no'}")
    assert out("x.tolist()").result == [[0.0, 0.0]] * 2


def test_a_module_may_name_its_parameters_as_an_optimizers_state_is_named(out, tmp_path):
    out(
        "import torch\nfrom torch import nn\nnet, one = nn.Module(), nn.Module()\n"
        "net.of = net.groups = nn.Parameter(torch.ones(3))\n"
        "one.register_buffer('of', torch.ones(1))"
    )
    out(f"%gpucluster checkpoint net,one --to {tmp_path}")
    out("net.of.data.zero_(); one.of.zero_()")
    out(f"%gpucluster restore {tmp_path}")
    assert out("net.of.tolist(), one.of.tolist()").result == [([1.0] * 3, [1.0])] * 2


def test_a_save_that_fails_says_why_and_the_checkpoint_before_it_stays(out, shell, tmp_path):
    with pytest.raises(GpuError, match="there is no complete checkpoint"):
        find(str(tmp_path))
    out("import torch\nx, mine = torch.ones(2), dist.get_rank()")
    out(f"%gpucluster checkpoint x --to {tmp_path}")
    breaks = (
        "import torch.distributed.checkpoint as dcp\nwriter = dcp.filesystem.FileSystemWriter\n"
    )
    breaks += "whole = writer.write_data\ndef no(*_): raise OSError('disk full')\n"
    out(breaks + "writer.write_data = no if mine else whole")
    text = shell.run(f"%gpucluster checkpoint x --to {tmp_path}").text
    assert "rank 1: OSError: disk full" in text
    out("writer.write_data = whole")
    assert find(str(tmp_path)) == tmp_path / "000001" == find(str(tmp_path / "000001"))
    with pytest.raises(GpuError, match="there is no complete checkpoint"):
        find(str(tmp_path / "000002"))
    out(f"%gpucluster checkpoint x --to {tmp_path}")
    assert find(str(tmp_path)) == tmp_path / "000003"


@pytest.mark.slow
def test_two_ranks_save_and_one_and_three_load_whole_modules_and_shards(tmp_path):
    program = """
        import sys
        import gpumagic

        KINDS = {
            "shards": "fully_shard(net[0]); fully_shard(net)",
            "ddp": "net = nn.parallel.DistributedDataParallel(net)",
            "whole": "",
        }
        MAKE = '''
        import torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).cuda()
        {}
        opt = torch.optim.AdamW(net.parameters(), 1e-2)
        step = 0
        '''
        # Virtual GPUs cannot run FSDP's forward.
        TRAIN = '''
        for _ in range(3):
            for p in net.parameters():
                p.grad = p.detach() + torch.full_like(p, 0.01 * (step + 1))
            opt.step()
            step += 1
        whole = [getattr(p.detach(), "full_tensor", p.detach)() for p in net.parameters()]
        step, [p.tolist() for p in whole]
        '''
        from textwrap import dedent
        made = []
        for count in (2, 1, 3):
            with gpumagic.cluster(count) as ranks:
                for here, code in KINDS.items():
                    ranks.run(dedent(MAKE).format(code))
                    if count == 2:
                        ranks.run(dedent(TRAIN))
                        ranks.checkpoint("net", "opt", "step", to=f"{sys.argv[1]}/{here}")
                        made += ranks.run(dedent(TRAIN))[0]
                        continue
                    for there in KINDS:
                        ranks.restore(f"{sys.argv[1]}/{there}")
                        made += ranks.run(dedent(TRAIN))[0]
        assert len(made) == 3 * 2 + 9 * (1 + 3)
        assert all(each == made[0] for each in made), made
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
