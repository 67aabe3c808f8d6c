"""Peaks of a dry run against the real ones: steps as people write them, and why they come right."""

import copy
import gc

import pytest
import torch
from dry_runs import check
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gpumagic

pytestmark = pytest.mark.usefixtures("gpus")
SLOW = pytest.mark.slow


def mlp(width=256, out=10):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(),
                         nn.Linear(width, out))  # fmt: skip


def blocks():
    return nn.ModuleList(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
    )


def test_a_gan():
    g = nn.Sequential(
        nn.Linear(16, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2), nn.Linear(128, 256)
    )
    d = nn.Sequential(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))

    def step(g, d, og, od, real):
        bce = F.binary_cross_entropy_with_logits
        yes, no = torch.ones(64, 1, device=real.device), torch.zeros(64, 1, device=real.device)
        for _ in range(2):
            fake = g(torch.randn(64, 16, device=real.device))
            od.zero_grad()
            (bce(d(real), yes) + bce(d(fake.detach()), no)).backward()
            od.step()
            og.zero_grad()
            bce(d(fake), yes).backward()
            og.step()

    check(step, g, d, torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters()),
          torch.randn(64, 256))  # fmt: skip


def test_a_penalty_on_gradients():
    def step(critic, opt, a, b):
        for _ in range(2):
            x = (a + torch.rand(len(a), 1, device=a.device) * (b - a)).requires_grad_()
            (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = critic(a).mean() - critic(b).mean() + ((g.norm(2, 1) - 1) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    net = mlp()
    check(step, net, torch.optim.Adam(net.parameters()), torch.randn(256, 64), torch.randn(256, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    def step(net, opt, x):
        for _ in range(2):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=dtype):
                loss = net(x).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()

    net = mlp()
    check(step, net, torch.optim.AdamW(net.parameters()), torch.randn(128, 64))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    def step(net, opt, x):
        h = x.requires_grad_()
        for block in net:
            h = h + checkpoint(block, h, use_reentrant=reentrant)
        opt.zero_grad()
        h.square().mean().backward()
        opt.step()

    net = blocks()
    check(step, net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(256, 64))


def test_gradients_that_pile_up():
    def step(net, opt, x):
        for n, part in enumerate(x.split(16)):
            net(part).square().mean().backward()
            if n % 4 == 3:
                opt.step()
                opt.zero_grad(set_to_none=False)

    net = mlp()
    check(step, net, torch.optim.AdamW(net.parameters()), torch.randn(128, 64))


def test_a_copy_that_follows():
    def step(net, opt, x):
        slow = copy.deepcopy(net)
        for _ in range(2):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
            with torch.no_grad():
                for a, b in zip(slow.parameters(), net.parameters(), strict=True):
                    a.lerp_(b, 0.1)
        return slow

    net = mlp()
    check(step, net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), torch.randn(64, 64))


def test_a_copy_has_no_gradients():
    net = mlp()
    net(torch.randn(8, 64)).sum().backward()
    check(copy.deepcopy, net)


def test_a_loop_that_evaluates():
    def step(net, xs, ys):
        losses, right = [], 0
        with torch.no_grad():
            for x, y in zip(xs.split(32), ys.split(32), strict=True):
                out = net(x)
                losses.append(F.cross_entropy(out, y))
                right = right + (out.argmax(1) == y).sum()
        return torch.stack(losses).mean(), right / len(ys)

    check(step, mlp().eval(), torch.randn(256, 64), torch.randint(0, 10, (256,)))


def test_truncated_backpropagation():
    def step(net, head, opt, x):
        state = None
        for part in x.split(8, 1):
            y, state = net(part, state)
            state = tuple(t.detach() for t in state)
            opt.zero_grad()
            F.mse_loss(head(y), part).backward()
            opt.step()

    net, head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 32)
    opt = torch.optim.RMSprop([*net.parameters(), *head.parameters()])
    check(step, net, head, opt, torch.randn(8, 32, 32))


def test_views_and_slices():
    def step(x):
        a = x[::2, 1:].t().contiguous().view(-1)[5:].clone()
        b = x.unfold(0, 8, 4).reshape(-1)
        c = torch.einsum("ij,kj->ik", x, x.expand(4, *x.shape).sum(0))
        return [t * 2 for t in x.chunk(4)], torch.cat([a, b[:10]]).flip(0), c, x.roll(1, 0)

    check(step, torch.randn(256, 128))


def test_a_layer_that_is_used_twice():
    def step(layer, x, y):
        (layer(x).sum() + layer(y).sum()).backward()

    check(step, nn.Linear(256, 256), torch.randn(4, 256), torch.randn(4, 256))


def test_a_result_that_is_used_often():
    def step(layer, x):
        h = layer(x)
        (h.tanh() + h.relu() + h.sigmoid() * h).square().sum().backward()

    check(step, nn.Linear(64, 64), torch.randn(512, 64))


def test_a_bilinear_layer():
    def step(layer, x):
        layer(x, x.flip(0)).square().mean().backward()

    check(step, nn.Bilinear(32, 32, 16), torch.randn(64, 32))


LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b),
    "bce of logits": F.binary_cross_entropy_with_logits,
    "bce, weighted": lambda a, b: F.binary_cross_entropy_with_logits(
        a, b, pos_weight=torch.ones(256, device=a.device)
    ),
    "labels": lambda a, b: F.multilabel_soft_margin_loss(a, b),
    "smoothed": lambda a, b: F.cross_entropy(a, b.argmax(1), label_smoothing=0.1),
}


@pytest.mark.parametrize(
    "loss", [n if n in ("mse", "smoothed") else pytest.param(n, marks=SLOW) for n in LOSSES]
)
def test_losses(loss):
    def step(net, x, y):
        for _ in range(2):
            net.zero_grad()
            LOSSES[loss](net(x), y).backward()

    check(step, nn.Linear(64, 256), torch.randn(512, 64), torch.rand(512, 256))


OPTIMIZERS = {
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "amsgrad": lambda p, **k: torch.optim.Adam(p, amsgrad=True, **k),
    "nadam": torch.optim.NAdam,
    "nesterov": lambda p, **k: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, **k),
}


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"foreach": False}, marks=SLOW)],
    ids=["as it is", "one by one"],
)
@pytest.mark.parametrize(
    "optimizer",
    [n if n in ("adagrad", "nadam") else pytest.param(n, marks=SLOW) for n in OPTIMIZERS],
)
def test_optimizers(optimizer, options):
    def step(net, opt, x):
        for _ in range(2):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()

    net = mlp()
    check(step, net, OPTIMIZERS[optimizer](net.parameters(), **options), torch.randn(16, 64))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers(kind):
    def step(net, opt, x):
        net(x).square().mean().backward()
        opt.step()

    net = mlp()
    check(step, net, kind(net.parameters(), lr=0.1, fused=True), torch.randn(16, 64))


def test_one_that_ended_early_keeps_no_memory():
    def step(x):
        return 1 if x.sum() > 0 else 2

    x = torch.randn(1000, device="cuda:1")
    assert not gpumagic.dry_run(step, x).complete
    del x
    gc.collect()
    assert torch.cuda.memory_allocated(1) == 0
