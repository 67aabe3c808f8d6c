"""Peaks of a dry run against the real ones: models as people write them."""

import pytest
import torch
from dry_runs import check
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("gpus")


class Call(nn.Module):
    """A network whose forward pass is a function of its layers."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers, self.function = nn.ModuleDict(layers), forward

    def forward(self, *args):
        return self.function(self.layers, *args)


def attend(n, x):
    return n["a"](x, x, x, need_weights=False)[0]


def attend_with_weights(n, x):
    return n["a"](x, x, x)[0]


def one_tensor(mask):
    def forward(n, x):
        x = n["l"](x).view(4, 4, -1, 16)
        if mask is None:
            return F.scaled_dot_product_attention(x, x, x)
        bars = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(x, x, x, bars, dropout_p=mask)

    return lambda: Call(forward, l=nn.Linear(64, 64))


def masked_decoder(n, x, memory):
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
    return n["t"](x, memory, tgt_mask=mask, tgt_is_causal=True)


def padded_encoder(n, words):
    return n["t"](n["e"](words), src_key_padding_mask=words == 0)


def residual(i, o, stride):
    def forward(n, x):
        y = n["b"](n["c"](F.relu(n["norm"](n["down"](x)), inplace=True)))
        y += n["skip"](x)
        return F.relu(y, inplace=True)

    return Call(
        forward, down=nn.Conv2d(i, o, 3, stride, 1, bias=False), norm=nn.BatchNorm2d(o),
        c=nn.Conv2d(o, o, 3, 1, 1, bias=False), b=nn.BatchNorm2d(o),
        skip=nn.Conv2d(i, o, 1, stride),
    )  # fmt: skip


def resnet():
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), residual(16, 16, 1), residual(16, 32, 2), *head)


def unet():
    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(4, o), nn.SiLU())

    def forward(n, x):
        top = n["a"](x)
        low = n["m"](n["b"](F.max_pool2d(top, 2)))
        return n["f"](n["o"](torch.cat([n["u"](low), top], 1)))

    return Call(
        forward, a=block(3, 16), b=block(16, 32), m=block(32, 32), o=block(32, 16),
        u=nn.ConvTranspose2d(32, 16, 2, 2), f=nn.Conv2d(16, 1, 1),
    )  # fmt: skip


def dense(n, x):
    for layer in n.values():
        x = torch.cat([x, layer(x)], 1)
    return x


def grown(width):
    return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 3, padding=1))


def mixer(n, x):
    x = x + n["over"](n["one"](x).transpose(1, 2)).transpose(1, 2)
    return x + n["within"](n["two"](x))


def llama(n, x):
    q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in n["qkv"](n["one"](x)).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + n["out"](y.transpose(1, 2).flatten(2))
    h = n["two"](x)
    return x + n["down"](F.silu(n["gate"](h)) * n["up"](h))


def seq2seq(n, words):
    memory = n["read"](n["e"](words))[0]
    state, out = memory[:, -1].contiguous(), []
    for t in range(6):
        weights = torch.bmm(memory, state[:, :, None]).softmax(1)
        state = n["write"](torch.cat([n["e"](words[:, t]), (weights * memory).sum(1)], 1), state)
        out.append(state)
    return torch.stack(out, 1)


def vae(n, x):
    mean, spread = n["encode"](x).chunk(2, 1)
    made = n["decode"](mean + torch.randn_like(mean) * (spread / 2).exp())
    return F.binary_cross_entropy(made.sigmoid(), x.sigmoid(), reduction="sum") + mean.sum()


def in_place(n, x):
    h = n["l"](x).relu_().clone()
    h.mul_(2)
    h += 1
    y = n["m"](h).clone()
    y[:, ::2] = 0
    y[:, 3] = h[:, 1]
    return y.masked_fill_(y > 0.5, 0.0)


def lora(n, x):
    return n["w"](x) + 0.5 * n["up"](n["down"](x))


def words(*shape):
    return lambda: (torch.randint(0, 100, shape),)


def numbers(*shapes):
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def attention(**options):
    return nn.MultiheadAttention(64, 4, batch_first=True, **options)


LLAMA = {"qkv": (64, 192), "out": (64, 64), "gate": (64, 172), "up": (64, 172), "down": (172, 64)}
MODELS = {
    "self-attention": (lambda: Call(attend, a=attention()), numbers((4, 256, 64))),
    "its weights": (lambda: Call(attend_with_weights, a=attention()), numbers((4, 256, 64))),
    "one tensor": (one_tensor(None), numbers((4, 256, 64))),
    "one tensor, masked": (one_tensor(0.0), numbers((4, 256, 64))),
    "slow attention": (one_tensor(0.1), numbers((4, 256, 64))),
    "decoder": (
        lambda: Call(
            masked_decoder, t=nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
        ),
        numbers((4, 30, 64), (4, 20, 64)),
    ),
    "padded encoder": (
        lambda: Call(
            padded_encoder,
            e=nn.Embedding(100, 64),
            t=nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        ),
        words(8, 40),
    ),
    "resnet": (resnet, numbers((8, 3, 64, 64))),
    "unet": (unet, numbers((4, 3, 32, 32))),
    "densenet": (
        lambda: Call(dense, **{str(n): grown(8 * n) for n in range(1, 5)}),
        numbers((4, 8, 24, 24)),
    ),
    "mixer": (
        lambda: Call(
            mixer, one=nn.LayerNorm(64), two=nn.LayerNorm(64),
            over=nn.Sequential(nn.Linear(49, 98), nn.GELU(), nn.Linear(98, 49)),
            within=nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.Linear(128, 64)),
        ),
        numbers((16, 49, 64)),
    ),
    "llama": (
        lambda: Call(
            llama, one=nn.RMSNorm(64), two=nn.RMSNorm(64),
            **{name: nn.Linear(*shape, bias=False) for name, shape in LLAMA.items()},
        ),
        numbers((4, 48, 64)),
    ),
    "seq2seq": (
        lambda: Call(
            seq2seq, e=nn.Embedding(100, 32), write=nn.GRUCell(128, 96),
            read=nn.GRU(32, 48, bidirectional=True, batch_first=True),
        ),
        words(8, 20),
    ),
    "vae": (
        lambda: Call(vae, encode=nn.Linear(256, 32), decode=nn.Linear(16, 256)),
        numbers((64, 256)),
    ),
    "in place": (
        lambda: Call(in_place, l=nn.Linear(64, 64), m=nn.Linear(64, 64)), numbers((256, 64))
    ),
    "lora": (
        lambda: Call(
            lora, w=nn.Linear(256, 256).requires_grad_(False), down=nn.Linear(256, 8, bias=False),
            up=nn.Linear(8, 256, bias=False),
        ),
        numbers((64, 256)),
    ),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(8, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ELU(), nn.MaxPool1d(2),
            nn.Conv1d(32, 32, 3, dilation=2), nn.InstanceNorm1d(32), nn.Flatten(1),
        ),
        numbers((16, 8, 200)),
    ),
    "conv3d": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.AvgPool3d(2),
            nn.Conv3d(8, 16, 3, groups=4), nn.AdaptiveAvgPool3d(1),
        ),
        numbers((4, 2, 12, 16, 16)),
    ),
    "bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(100, 64, mode="sum"), nn.Linear(64, 4)),
        words(64, 20),
    ),
}  # fmt: skip
for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    for _name, _options in (
        ("", {}), (", both ways", {"bidirectional": True}), (", deep", {"num_layers": 2}),
    ):  # fmt: skip
        MODELS[_kind.__name__ + _name] = (
            lambda kind=_kind, o=_options: Call(
                lambda n, x: n["r"](x)[0], r=kind(32, 48, batch_first=True, **o)
            ),
            numbers((8, 10, 32)),
        )


def train(net, opt, *args):
    for _ in range(2):
        opt.zero_grad()
        net(*args).square().mean().backward()
        opt.step()


@torch.no_grad()
def without_gradients(net, *args):
    return net(*args)


@torch.inference_mode()
def inference(net, *args):
    return net(*args)


def few(one_of):
    """One of so many models each time, all of them with -m slow."""
    slow = pytest.mark.slow
    return [m if n % one_of == 0 else pytest.param(m, marks=slow) for n, m in enumerate(MODELS)]


@pytest.mark.parametrize("model", few(3))
def test_training(model):
    torch.manual_seed(0)
    make, args = MODELS[model]
    net = make()
    check(train, net, torch.optim.AdamW(net.parameters()), *args())


@pytest.mark.parametrize("way", [without_gradients, inference])
@pytest.mark.parametrize("model", few(7))
def test_inference(model, way):
    make, args = MODELS[model]
    check(way, make().eval(), *args())


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torchscript_is_followed():
    script = torch.jit.script(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))

    def train(script, x):
        loss = script(x).square().mean()
        loss.backward()
        return loss

    check(train, script, torch.randn(512, 64))
