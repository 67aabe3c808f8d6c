"""`gpumagic.explain`: fixes for what fails next too."""

import pytest
import torch
from corpus_score import applied
from snippets import names_told, run

import gpumagic
from gpumagic.dryrun.try_fix import try_fix

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]


def assert_fixed(code, by):
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == by
    assert run(fix.apply(code)) is None


def test_the_state_of_an_optimizer_whose_step_no_line_can_precede_is_explained_without_a_fix():
    code = (
        "net = nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)\n"
        "net(torch.ones(1, 2)).sum().backward(); opt.step()\nnet.cuda(); opt.zero_grad()\n"
        'x = torch.ones(1, 2, device="cuda")\nnet(x).sum().backward(); opt.step()\n'
    )
    explanation = gpumagic.explain(run(code))
    assert names_told(explanation)["opt.state"].odd
    assert "or move the model before the optimizer steps" in explanation.reason
    assert explanation.fix is None


def test_a_loss_that_is_made_where_it_is_called():
    code = 'x = torch.ones(3, device="cuda")\nnn.MSELoss()(x * 2, torch.zeros(3))\n'
    assert_fixed(code, "nn.MSELoss()(x * 2, torch.zeros(3, device=x.device))")


def test_three_devices_of_which_one_is_known_from_the_text_alone():
    code = (
        "torch.where(torch.tensor([True, False]), torch.ones(2, device='cuda:0'), "
        "torch.zeros(2, device='cuda:1'))\n"
    )
    explanation = gpumagic.explain(run(code))
    assert [o.devices for o in explanation.operands] == [("cpu",), ("cuda:0",), ("cuda:1",)]
    assert run(explanation.fix.apply(code)) is None


def test_lengths_that_are_not_on_the_host_and_no_other_tensor():
    code = (
        "s, lens = torch.ones(2, 3, 4).cuda(), torch.tensor([3, 2]).cuda()\n"
        "nn.utils.rnn.pack_padded_sequence(s, {}, batch_first=True)\n"
    )
    for given in ("lens", "lengths=lens"):
        fix = gpumagic.explain(run(code.format(given))).fix
        assert run(fix.apply(code.format(given))) is None
    with gpumagic.on(0):
        made = run(code.format("torch.tensor([3, 2])"))
    assert gpumagic.explain(made) is None


@pytest.mark.parametrize("index", ["mask", "ids", "mask, 0"])
def test_an_index_on_the_cpu_stays_if_the_assigned_value_is_to_move(index):
    made = "mask, ids = torch.tensor([True, True]), torch.tensor([1, 0])\n"
    code = f"{made}g, c = torch.ones(2, 2).cuda(), torch.ones(2, 2)\ng[{index}] = c[{index}]\n"
    error = run(code)
    explanation = try_fix(error, gpumagic.explain(error))
    assert explanation.fix.code == f"g[{index}] = c[{index}].to(g.device)"
    assert run(applied(explanation, code)) is None


NEXT = """
def f(x):
    s = torch.ones(3)
    return x * s
def g(x):
    return f(x) + {other}
other = torch.ones(3)
y = g(torch.ones(3, device="cuda"))
"""


@pytest.mark.parametrize(("other", "follows"), [("other", True), ("other.cuda()", False)])
def test_a_fix_that_brings_the_next_error_has_the_edit_for_it_too(other, follows):
    code = NEXT.replace("{other}", other)
    error = run(code)
    explanation = try_fix(error, gpumagic.explain(error))
    assert names_told(explanation)["s"].devices == ("cpu",)
    assert ("other.to(x.device)" in explanation.fix.code) is follows
    assert run(applied(explanation, code)) is None


def test_what_is_made_later_and_fails_next_is_explained_in_its_turn():
    code = (
        'a = torch.ones(2, device="cuda")\nm = torch.zeros(2).bool()\nb = a.masked_fill(m, 0)\n'
        "w = torch.arange(2)\nc = b * w\n"
    )
    for _ in range(2):
        code = gpumagic.explain(run(code)).fix.apply(code)
    assert run(code) is None


def test_what_exists_and_fails_next_moves_along():
    code = (
        'a, w = torch.ones(2, device="cuda"), torch.arange(2)\nm = torch.zeros(2).bool()\n'
        "b = a.masked_fill(m, 0)\nc = b * w\n"
    )
    error = run(code)
    assert run(applied(try_fix(error, gpumagic.explain(error)), code)) is None


def test_a_module_that_a_loop_needs_on_both_devices_is_not_moved():
    code = (
        "enc = nn.Linear(2, 2)\nfor step in range(2):\n    a = enc(torch.ones(1, 2)).sum()\n"
        '    b = enc(torch.ones(1, 2, device="cuda"))\n'
    )
    explanation = gpumagic.explain(run(code))
    assert names_told(explanation)["enc"].odd
    assert explanation.fix is None


def test_functions_that_call_each_other_do_not_keep_it_busy():
    calls = " + ".join(["f(x)"] * 12)
    code = f"def f(x):\n    return {calls}\na = torch.ones(2)\nb = a.cuda()\nc = a + b\nf(c)\n"
    error = run(code.replace("f(c)\n", ""))
    assert gpumagic.explain(error).fix is not None
    assert gpumagic.explain(run(code)).fix is not None


def test_a_file_of_another_machine_is_loaded_to_the_cpu_with_what_else_was_asked_for():
    said = "Attempting to deserialize object on CUDA device 2 but torch.cuda.device_count() is 1"
    error = run("data = torch.load('missing.pt', weights_only=True)\n")
    assert isinstance(error, FileNotFoundError)
    fix = gpumagic.explain(RuntimeError(said).with_traceback(error.__traceback__)).fix
    assert fix.code == "data = torch.load('missing.pt', weights_only=True, map_location=\"cpu\")"


MADE = [
    (
        "total = torch.zeros(3)\nfor _ in range(3):\n    loss = torch.rand(3, device='cuda')\n"
        "    total += loss\n",
        'total = torch.zeros(3, device="cuda:0")',
    ),
    (
        "device, total = 'cuda:0', 0\nhits = torch.zeros(1)\nfor _ in range(3):\n"
        "    hits = hits + torch.ones(1, device=device)\n",
        "hits = torch.zeros(1, device=device)",
    ),
    (
        "def noisy(x):\n    noise = torch.randn(x.shape)\n    return x + 0.1 * noise\n"
        "noisy(torch.ones(3, device='cuda'))\n",
        "    noise = torch.randn(x.shape, device=x.device)",
    ),
    (
        "x = torch.ones(3, device='cuda')\ny = x + 0.1 * torch.rand(x.size())\n",
        "y = x + 0.1 * torch.rand(x.size(), device=x.device)",
    ),
    (
        "x = torch.ones(3, device='cuda')\nseen = x.to(torch.uint8).type(torch.FloatTensor)\n"
        "y = x * seen\n",
        "seen = x.to(torch.uint8).to(x.device, torch.float32)",
    ),
    (
        "x, i = torch.ones(3, device='cuda'), torch.ones(3)\ny = x * i.type_as(torch.ones(1))\n",
        "y = x * i.type_as(torch.ones(1, device=x.device))",
    ),
]


@pytest.mark.parametrize(("code", "fixed"), MADE)
def test_what_is_made_at_home_is_made_there_rather_than_moved_each_time(code, fixed):
    assert_fixed(code, fixed)


FUNCTION = """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * x
w = torch.ones(3, requires_grad=True)
x = torch.ones(3, device="cuda", requires_grad=True)
{call}.sum().backward()
"""


def test_within_a_functions_own_forward_nothing_is_moved():
    code = FUNCTION.replace("{call}", "Scale.apply(x, w)")
    assert_fixed(code, 'w = torch.ones(3, requires_grad=True, device="cuda:0")')
    explanation = gpumagic.explain(run(FUNCTION.replace("{call}", "Scale.apply(*[x, w * 1])")))
    assert names_told(explanation)["w"].odd
    assert explanation.fix is None


ATTENTION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
    def forward(self, x):
        att = self.q(x) @ x.transpose(-2, -1)
        mask = torch.tril(torch.ones(5, 5))
        att = att.masked_fill(mask == 0, 0.0)
        return att @ x
Attention().cuda()(torch.randn(2, 5, 8, device="cuda"))
"""


def test_the_device_of_what_is_made_in_a_class_is_that_of_a_tensor_there():
    fix = gpumagic.explain(run(ATTENTION)).fix
    assert "torch.ones(5, 5, device=att.device)" in fix.code
    assert run(fix.apply(ATTENTION)) is None


def test_the_rows_of_an_explanation_are_operands_and_not_the_module_that_has_them():
    code = (
        "class P(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.pe = torch.zeros(1, 9, 4)\n    def forward(self, x):\n"
        "        return x + self.pe[:, : x.size(1)]\nP()(torch.ones(2, 3, 4).cuda())\n"
    )
    explanation = gpumagic.explain(run(code))
    assert [operand.name for operand in explanation.operands] == ["x", "self.pe"]
    assert "self.pe is a plain attribute" in explanation.reason


ORDINALS = [
    'torch.ones(2, device="cuda:2")',
    "torch.ones(9).cuda(3)",
    "where = torch.device('cuda:7')\nfor _ in range(2):\n    x = nn.Linear(9, 9).to(where)",
    "f = io.BytesIO()\ntorch.save(torch.ones(2), f)\nf.seek(0)\ntorch.load(f, 'cuda:3')",
]


@pytest.mark.parametrize("code", ORDINALS)
def test_the_number_of_a_gpu_that_is_not_here_becomes_that_of_the_last_one(code):
    code = f"import io\n{code}\n"
    explanation = gpumagic.explain(run(code))
    assert run(explanation.fix.apply(code)) is None
    assert "there are cuda:0 and cuda:1" in explanation.reason


def test_a_device_of_another_cell_that_is_not_here_is_bound_again_once():
    code, there = "for _ in range(2):\n    x = torch.ones(2).to(d)\n", {"d": torch.device("cuda:4")}
    fix = gpumagic.explain(run(code, namespace=there)).fix
    assert (fix.line, fix.code) == (1, 'd = torch.device("cuda:1")')
    assert run(fix.apply(code), namespace=there) is None


@pytest.mark.parametrize("data", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("model", ["cpu", "cuda:1"])
def test_a_parallel_module_is_on_the_first_of_its_gpus(model, data):
    code = (
        f"model = nn.DataParallel(nn.Linear(4, 2).to('{model}'), device_ids=[0, 1])\n"
        f"model(torch.ones(8, 4, device='{data}'))\n"
    )
    assert_fixed(code, 'model.to("cuda:0")')


def test_what_draws_by_torchs_own_generator_on_a_default_device_is_given_one():
    code = (
        "torch.set_default_device('cuda')\ndata = torch.utils.data.TensorDataset(torch.ones(9))\n"
        "parts = torch.utils.data.random_split(data, [6, 3])\n"
    )
    error = run(code)
    fix = gpumagic.explain(error).fix
    assert fix.code.endswith('[6, 3], generator=torch.Generator("cuda:0"))')
    assert run(fix.apply(code)) is None
    torch.set_default_device(None)


@pytest.mark.parametrize(
    "code",
    [
        "outs = [head(x) for head in heads]\n",
        "outs = []\nfor head in heads:\n    outs.append(head(x))\n",
    ],
)
def test_modules_of_several_gpus_that_a_loop_calls_get_their_data_each(code):
    heads = "heads = [nn.Linear(2, 2).to(f'cuda:{n}') for n in range(2)]\n"
    code = f"{heads}x = torch.ones(2, device='cuda:0')\n{code}"
    assert run(gpumagic.explain(run(code)).fix.apply(code)) is None


def test_a_parameter_that_numpy_reads_stays_where_it_is_trained():
    code = "w = torch.ones(3, requires_grad=True, device='cuda')\ny = (w * 2).sum()\nnp.array(w)\n"
    assert_fixed(code, "np.array(w.detach().cpu())")


def test_what_numpy_reads_in_a_modules_forward_is_copied_there():
    code = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(4, 2)\n    def forward(self, x):\n"
        "        h = self.fc(x)\n        return np.tanh(h)\n"
        "Net().cuda()(torch.ones(3, 4).cuda())\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code.strip() == "return np.tanh(h.detach().cpu())"
    assert run(fix.apply(code)) is None


MODULE = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        {made}
    def forward(self, x):
        return {used}
net = nn.Sequential(nn.Linear(4, 4), Part()).cuda()
net(torch.ones(2, 4, device="cuda"))
"""
REGISTERED = [
    (
        "self.pe = torch.ones(4)",
        "x + self.pe",
        'self.register_buffer("pe", torch.ones(4), persistent=False)',
    ),
    (
        "self.w = torch.ones(4, requires_grad=True); self.n = 1",
        "x * self.w",
        "self.w = nn.Parameter(torch.ones(4, requires_grad=True)); self.n = 1",
    ),
    (
        "self.mean = torch.ones(4); self.tags = ['a']; self.out = [nn.Linear(4, 2)]",
        "self.out[0](x - self.mean)",
        'self.register_buffer("mean", torch.ones(4), persistent=False); '
        "self.tags = ['a']; self.out = nn.ModuleList([nn.Linear(4, 2)])",
    ),
    (
        "self.layers = [  # two\n            nn.Linear(4, 4) for _ in range(2)]",
        "self.layers[1](x)",
        "self.layers = nn.ModuleList([  # two\n            nn.Linear(4, 4) for _ in range(2)])",
    ),
    (
        'self.heads = {"a": nn.Linear(4, 2)}',
        'self.heads["a"](x)',
        'self.heads = nn.ModuleDict({"a": nn.Linear(4, 2)})',
    ),
    (
        "self.ws = [nn.Parameter(torch.ones(4)) for _ in range(2)]",
        "sum(x * w for w in self.ws)",
        "self.ws = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])",
    ),
]


@pytest.mark.parametrize(("made", "used", "fixed"), REGISTERED)
def test_what_a_module_does_not_move_is_registered_where_its_class_makes_it(made, used, fixed):
    code = MODULE.format(made=made, used=used)
    explanation = gpumagic.explain(run(code))
    assert explanation.fix.code.strip() == fixed
    assert run(explanation.fix.apply(code)) is None
    assert ".to()" in explanation.reason
    assert "permanently" not in explanation.reason  # the fix says it


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("self.pe = None", "x + (setattr(self, 'pe', torch.ones(4)) or self.pe)"),
        ("self.pe = torch.ones(4)\n        self.pe = torch.ones(4)", "x + self.pe"),
        ('self.heads = {"a.b": nn.Linear(4, 2)}', 'self.heads["a.b"](x)'),
    ],
)
def test_what_cannot_be_registered_by_one_edit_moves_where_it_is_used(made, used):
    code = MODULE.format(made=made, used=used)
    fix = gpumagic.explain(run(code)).fix
    assert "register" not in fix.code
    assert "ModuleDict" not in fix.code
    assert run(fix.apply(code)) is None


HEAD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 9)
    def forward(self, x):
        return self.head(self.body(x))
net = Net().cuda()
net.head = nn.Linear(4, 2)
x = torch.ones(2, 4, device="cuda")
y = net(x)
"""


def test_a_module_that_got_a_new_layer_after_it_moved_is_moved_again():
    fix = gpumagic.explain(run(HEAD)).fix
    assert (fix.code, fix.line) == ("net.to(x.device)", 11)
    assert run(fix.apply(HEAD)) is None
    # What runs on two devices on purpose stays so.
    split = HEAD.replace("Net().cuda()", "Net().cuda(0)").replace("(4, 2)", "(4, 2).cuda(1)")
    assert "self.head(self.body(x).to(" in gpumagic.explain(run(split)).fix.code


def test_two_states_that_forward_makes_are_both_made_there():
    code = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lstm = nn.LSTM(4, 3)\n    def forward(self, x):\n"
        "        h = torch.zeros(1, x.size(1), 3)\n        c = torch.zeros(1, x.size(1), 3)\n"
        "        return self.lstm(x, (h, c))\nNet().cuda()(torch.ones(5, 2, 4).cuda())\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert [line.strip() for line in fix.code.splitlines()] == [
        f"{name} = torch.zeros(1, x.size(1), 3, device=x.device)" for name in "hc"
    ]
    assert run(fix.apply(code)) is None


ONCE = [
    (  # an accumulator of another cell
        "total, n = torch.zeros(3), 0\nfor x in torch.ones(2, 3).cuda():\n    total += x\n",
        ("before", 2, 'total = total.to("cuda:0")'),
    ),
    (  # what a loop updates from its own value
        "h, net = torch.zeros(1, 2) + 0, nn.GRUCell(2, 2).cuda()\n"
        "for x in torch.ones(2, 1, 2).cuda():\n    h = net(x, h)\n",
        ("before", 2, 'h = h.to("cuda:0")'),
    ),
    (  # what a later statement extends
        "rows = torch.ones(3, 1)\n"
        "ids, net = torch.ones(1, 2).long() + 0, nn.Embedding.from_pretrained(rows).cuda()\n"
        "for n in range(2):\n    y = net(ids)[:, -1].long()\n    ids = torch.cat([ids, y], 1)\n",
        ("before", 3, 'ids = ids.to("cuda:0")'),
    ),
    (  # what it binds afresh moves in each turn
        "net, xs = nn.Linear(2, 1).cuda(), [torch.ones(1, 2)] * 2\nfor x in xs:\n"
        "    y = net(x)\n    z = x.sum()\n",
        ("before", 3, '    x = x.to("cuda:0")'),
    ),
    (  # trained tensors stay the same objects
        "w, x = torch.ones(2, requires_grad=True), torch.ones(2).cuda()\n"
        "opt = torch.optim.SGD([w], lr=0.1)\nfor _ in range(2):\n    (w * x).sum().backward()\n"
        "    opt.step()\n",
        ("before", 3, "w.data = w.data.to(x.device)"),
    ),
    (
        "x = torch.ones(2).cuda()\nw = nn.Parameter(torch.ones(2) * 0.1)\n"
        "(w * x).sum().backward()\n",
        ("replace", 2, "w = nn.Parameter(torch.ones(2, device=x.device) * 0.1)"),
    ),
    (  # a module that stayed behind, by its name at the top
        "import copy\nnet = nn.Linear(2, 1)\nema = copy.deepcopy(net)\nnet.cuda()\n"
        "def update(ema, net):\n    for e, p in zip(ema.parameters(), net.parameters()):\n"
        "        e.data.mul_(0.9).add_(p.data, alpha=0.1)\n"
        "for _ in range(2):\n    update(ema, net)\n",
        ("before", 8, 'ema.to("cuda:0")'),
    ),
    (  # a tensor in an object, by the object's name at the top
        "class Meter:\n    def __init__(self):\n        self.sum = torch.zeros(2)\n"
        "    def add(self, x):\n        self.sum += x\n"
        "meter = Meter()\nfor x in torch.ones(3, 2).cuda():\n    meter.add(x)\n",
        ("before", 7, 'meter.sum = meter.sum.to("cuda:0")'),
    ),
    (  # a module that each pass sends to the CPU
        "net, x = nn.Linear(2, 1).cuda(), torch.ones(1, 2).cuda()\ndef save(model):\n"
        "    model.cpu()\ndef loss(net):\n    return net(x).sum()\n"
        "for _ in range(3):\n    loss(net)\n    save(net)\n",
        ("before", 7, '    net.to("cuda:0")'),
    ),
    (
        "x = torch.ones(2).cuda()\nx.add_(torch.ones(2).cuda().cpu())\n",
        ("replace", 2, "x.add_(torch.ones(2).cuda())"),
    ),
]


@pytest.mark.parametrize(("code", "fixed"), ONCE)
def test_what_is_used_in_each_turn_is_moved_once_where_it_was_made_or_before_the_loop(code, fixed):
    fix = gpumagic.explain(run(code)).fix
    assert (fix.where, fix.line, fix.code) == fixed
    assert run(fix.apply(code)) is None


def test_a_parameter_that_was_computed_with_is_registered_as_one():
    code = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.ones(2)) * 0.1\n"
        "    def forward(self, x):\n        return x * self.w\n"
        "Net().cuda()(torch.ones(2).cuda())\n"
    )
    assert_fixed(code, "        self.w = nn.Parameter(torch.ones(2) * 0.1)")


NO_NAME_AT_THE_CALL = [
    (
        "from functools import partial\nx, y = torch.ones(2, 2).cuda(), torch.ones(2)\n"
        "f = partial(torch.mv, x)\nf(y)\n",
        'f(y.to("cuda:0"))',
    ),
    (
        "net, xs = nn.Linear(2, 1).cuda(), [torch.ones(1, 2)]\nout = list(map(net, xs))\n",
        'out = list(map(net, [t.to("cuda:0") for t in xs]))',
    ),
    (
        "x, y = torch.ones(2).cuda(), np.ones(2)\nsame = (y == x).mean()\n",
        "same = (y == x.cpu().numpy()).mean()",
    ),
]


@pytest.mark.parametrize(("code", "fixed"), NO_NAME_AT_THE_CALL)
def test_operands_behind_a_partial_in_a_map_and_of_numpy(code, fixed):
    assert_fixed(code, fixed)


def test_a_fix_of_several_lines_with_comments_is_python():
    code = (
        'g = torch.ones(2, 3, device="cuda")\nx = torch.zeros(\n    2,  # rows\n    3,\n)\n'
        "y = g * x\n"
    )
    assert_fixed(code, "x = torch.zeros(2, 3, device=g.device)")


def test_a_function_of_numpy_is_given_no_device():
    code = (
        "w = torch.from_numpy(np.random.randn(2)).requires_grad_()\n"
        'y = torch.ones(2, device="cuda") * w\n'
    )
    assert_fixed(code, 'w.data = w.data.to("cuda:0")')


BOUND_BY_THE_LOOP = [
    (
        "nets = [nn.Linear(2, 1), nn.Linear(2, 1)]\nfor i in range(2):\n    y = nets[i](x)\n",
        "    nets[i].to(x.device)",
    ),
    (
        "from types import SimpleNamespace\ns = SimpleNamespace(mask=torch.ones(2))\n"
        "for _ in range(2):\n    y = x * s.mask\n    s.mask = torch.zeros(2)\n",
        "    y = x * s.mask.to(x.device)",
    ),
]


@pytest.mark.parametrize(("code", "fixed"), BOUND_BY_THE_LOOP)
def test_no_line_before_a_loop_moves_what_the_loop_binds(code, fixed):
    code = 'x = torch.ones(2, device="cuda")\n' + code
    assert_fixed(code, fixed)


GIVEN_BY_ANOTHER = [
    (
        "def f(h=None):\n    if h is None:\n        h = torch.zeros(2)\n    return x * h\n"
        "f(torch.ones(2))\n",
        "    h = h.to(x.device)",
    ),
    (
        "def f(h):\n    for _ in range(2):\n        y = x * h\n        h = torch.zeros(2)\n"
        "f(torch.ones(2))\n",
        "        y = x * h.to(x.device)",
    ),
]


@pytest.mark.parametrize(("code", "fixed"), GIVEN_BY_ANOTHER)
def test_an_assignment_that_may_not_have_run_is_not_where_an_operand_was_made(code, fixed):
    code = 'x = torch.ones(2, device="cuda")\n' + code
    assert_fixed(code, fixed)


def test_an_operand_that_is_given_twice_is_moved_once():
    code = (
        "attention = nn.MultiheadAttention(4, 2).cuda()\nfor x in torch.ones(2, 3, 1, 4):\n"
        "    y = attention(x, x, x)\n"
    )
    assert_fixed(code, '    x = x.to("cuda:0")')


def test_a_number_beside_the_result_of_a_helper():
    code = (
        "def mask():\n    return torch.ones(3, 3).triu(1) > 0\n"
        "def scores(x):\n    return x.masked_fill(mask(), float('-inf'))\n"
        "y = scores(torch.ones(3, 3, device='cuda'))\n"
    )
    assert_fixed(code, "    return x.masked_fill(mask().to(x.device), float('-inf'))")


def test_lengths_that_torch_reads_on_the_cpu_are_copied_where_it_reads_them():
    code = (
        "class Net(nn.Module):\n"
        "    def forward(self, x, n):\n"
        "        return nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True).data\n"
        "net, n = Net(), torch.tensor([3, 2], device='cuda')\n"
        "y = net(torch.ones(2, 3, 4, device='cuda'), n) + torch.ones(4, device='cuda')\n"
    )
    by = "        return nn.utils.rnn.pack_padded_sequence(x, n.cpu(), batch_first=True).data"
    assert_fixed(code, by)


def test_tensors_that_the_next_lines_make_are_made_there_too():
    code = (
        "def mean(src, index, n):\n"
        "    total = torch.zeros(n).index_add_(0, index, src)\n"
        "    count = torch.zeros(n).index_add_(0, index, torch.ones(len(index)))\n"
        "    return total / count\n"
        "y = mean(torch.ones(4, device='cuda'), torch.tensor([0, 1, 1, 0], device='cuda'), 2)\n"
    )
    by = (
        "    total = torch.zeros(n, device=index.device).index_add_(0, index, src)\n"
        "    count = torch.zeros(n, device=index.device)"
        ".index_add_(0, index, torch.ones(len(index), device=index.device))"
    )
    assert_fixed(code, by)


def test_a_function_reads_no_global_whose_name_is_one_of_its_attributes():
    code = (
        "device = 'cuda'\n"
        "def slope(x):\n"
        "    y = x * torch.ones(3, device=x.device)\n"
        "    return torch.autograd.grad(y, x, torch.ones(3))\n"
        "slope(torch.ones(3, device=device, requires_grad=True))\n"
    )
    assert_fixed(code, "    return torch.autograd.grad(y, x, torch.ones(3, device=y.device))")


@pytest.mark.parametrize(
    ("written", "by"),
    [
        ("(u - v).cpu() * w", "(u - v) * w"),
        ("w & (u > 0).cpu()", "w & (u > 0)"),
        ("w ** (u + v).to('cpu')", "w ** (u + v)"),
        ("(u + v).cpu().sqrt() + w", "(u + v).cpu().sqrt().to(u.device) + w"),
        ("torch.add((u - v).cpu(), w)", "torch.add((u - v), w)"),
    ],
)
def test_what_no_longer_leaves_the_gpu_keeps_its_brackets(written, by):
    kind = "bool" if "&" in written else "float"
    code = (
        "u, v = torch.arange(3.0, device='cuda'), torch.ones(3, device='cuda')\n"
        f"w = torch.full((3,), 2, device='cuda').{kind}()\n{written}\n"
    )
    assert_fixed(code, by)


# As they are asked most in forums: the code, and a line of the fix.
ASKED = {
    "a method's result": (
        "class Net:\n    def features(self, x):\n        return x * 2\n"
        "net, a = Net(), torch.ones(3, device='cuda')\nfeature = net.features(a).data.numpy()",
        "feature = net.features(a).data.cpu().numpy()",
    ),
    "items that NumPy reads": (
        "import numpy as np\ndef half(v):\n    return (v / 2).sum()\n"
        "w = torch.ones(3, device='cuda', requires_grad=True)\n"
        "mean = np.mean([half(w) for n in range(3)])",
        "mean = np.mean([half(w).detach().cpu() for n in range(3)])",
    ),
    "an object with data there": (
        "import numpy as np\nclass Data:\n    def __init__(self):\n"
        "        self.y = torch.ones(3, device='cuda')\n    def inverse(self, scaled):\n"
        "        return np.asarray(scaled)\n"
        "data, out = Data(), torch.ones(3, device='cuda')\na = data.inverse(out)",
        "a = data.inverse(out.cpu())",
    ),
    "an index made beside": (
        "def targets(t):\n    at = torch.arange(3).view(3, 1).repeat(1, 2)\n    j = t > 0\n"
        "    return at[j], t[j]\na, b = targets(torch.ones(3, 2, device='cuda'))\na + b",
        "at = torch.arange(3, device=t.device).view(3, 1).repeat(1, 2)",
    ),
    "a mask of data there": (
        "def levels(t):\n    found = []\n    for n in range(2):\n"
        "        found.append(torch.ones(3) * n)\n    found = torch.cat(found)\n"
        "    mask = t > 0\n    return found[mask], t[mask]\n"
        "a, b = levels(torch.ones(6, device='cuda'))\na + b",
        "found = found.to(mask.device)",
    ),
    "copies that nothing keeps": (
        "device, net = torch.device('cuda:1'), torch.nn.Linear(4, 2).to('cuda:1')\n"
        "x, y = torch.rand(3, 4), torch.tensor([0, 1, 1])\nx.to(device)\ny.to(device)\n"
        "loss = torch.nn.functional.cross_entropy(net(x), y)",
        "y = y.to(device)",
    ),
    "a number left out": (
        "def padded(a):\n    return torch.cat([a, torch.zeros(2).cuda()])\n"
        "padded(torch.ones(2, device='cuda:1'))",
        "return torch.cat([a, torch.zeros(2).to(a.device)])",
    ),
    "the device that a transfer names": (
        "y, t, dev = torch.ones(3, device='cuda:1'), torch.ones(3), 'cuda:0'\n"
        "loss = nn.functional.mse_loss(y, t.to(dev))",
        "loss = nn.functional.mse_loss(y, t.to(y.device))",
    ),
    "a state that a method makes": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.lstm = nn.LSTM(2, 3)\n    def initial(self, n):\n"
        "        h = torch.zeros(1, n, 3)\n        return h, torch.zeros(1, n, 3)\n"
        "    def forward(self, x):\n        state = self.initial(x.size(1))\n"
        "        return self.lstm(x, state)[0]\nNet().cuda()(torch.ones(4, 2, 2).cuda())",
        "h = torch.zeros(1, n, 3, device=next(self.parameters()).device)",
    ),
    "a device of the notebook in a function that does not read it": (
        "dev = torch.device('cuda')\nnet = nn.Sequential(nn.Linear(2, 1)).to(dev)\n"
        "def score(row):\n"
        "    return net(torch.tensor([row]))\nscore([1.0, 2.0])",
        "return net(torch.tensor([row], device=dev))",
    ),
    "a part of what the function made": (
        "net = nn.Embedding(9, 2).cuda()\ndef scores(words):\n    ids = torch.tensor([words])\n"
        "    for n in range(0, 4, 2):\n        part = ids[:, n:n + 2]\n        net(part)\n"
        "scores([1, 2, 3, 4])",
        "ids = torch.tensor([words], device=",
    ),
    "a weight moved by itself": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(3, 1)\n"
        "        self.bias = torch.zeros(1, requires_grad=True).cuda()\n"
        "    def forward(self, x):\n        return self.fc(x) + self.bias\n"
        "net = Net().to('cuda:1')\nnet(torch.ones(2, 3, device='cuda:1')).sum().backward()",
        "self.bias = nn.Parameter(torch.zeros(1, requires_grad=True).cuda())",
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_asked_most_is_mended(asked):
    code, by = ASKED[asked]
    fix = gpumagic.explain(run(code)).fix
    assert by in fix.code
    assert run(fix.apply(code)) is None


def test_tables_that_functions_read_in_each_pass_are_moved_once_before_the_loop():
    code = (
        "steps, rest = torch.linspace(0, 1, 9), torch.linspace(1, 0, 9)\n"
        "def at(a, t):\n    return a[t].view(-1, 1)\n"
        "def noisy(x, t):\n    return at(steps, t) * x + at(rest, t)\n"
        "for t in (1, 2):\n    noisy(torch.ones(1, 2).cuda(), torch.tensor([t]).cuda())\n"
    )
    error = run(code)
    told = try_fix(error, gpumagic.explain(error))
    assert {f'{x} = {x}.to("cuda:0")' for x in ("rest", "steps")} == {*told.fix.code.splitlines()}
    assert run(applied(told, code)) is None


def test_a_fix_that_leaves_an_unregistered_tensor_has_the_edit_for_it_too():
    code = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(2, 1)\n        self.scale = torch.ones(1)\n"
        "    def forward(self, x):\n        return self.fc(x) * self.scale\n"
        "Net().cuda(1)(torch.ones(2).cuda())\n"
    )
    error = run(code)
    told = try_fix(error, gpumagic.explain(error))
    assert 'self.register_buffer("scale", torch.ones(1), persistent=False)' in told.fix.code
    assert run(applied(told, code)) is None


def test_the_line_that_moved_a_module_is_named():
    told = gpumagic.explain(run(ONCE[-2][0]))
    assert told.reason == "snippet.py, line 3: model.cpu() moves the module itself"


def test_functions_of_a_loop_whose_source_is_no_code_alone_are_no_reason():
    code = (
        "net, x = nn.Linear(2, 1), torch.ones(1, 2).cuda()\n"
        "also = [lambda m: m.cpu(),\n        lambda m: None]\nfor n in range(2):\n"
        "    nn.Linear(2, 1)(x)\n    also[0](net)\n"
    )
    told = gpumagic.explain(run(code))
    assert told.reason is None
    assert run(told.fix.apply(code)) is None


def test_a_loss_or_a_local_module_that_a_function_makes_is_moved():
    code = (
        "def step(x):\n    head = nn.Linear(4, 2)\n    return head(x)\n"
        "step(torch.ones(3, 4, device='cuda'))"
    )
    told = gpumagic.explain(run(code))
    assert "__init__" not in (told.reason or "")
    assert run(told.fix.apply(code)) is None


def test_numbers_are_drawn_where_a_generator_of_another_cell_is_and_then_moved():
    code, g = "x = torch.randn(4, generator=g, device='cuda')", torch.Generator().manual_seed(7)
    explanation = gpumagic.explain(run(code, namespace={"g": g}))
    assert explanation.fix.code == "x = torch.randn(4, generator=g, device=\"cpu\").to('cuda')"
    assert explanation.reason.endswith('create g with torch.Generator("cuda:0")')
    known = {"g": g.manual_seed(7), "same": torch.randn(4, generator=g).cuda()}
    g.manual_seed(7)
    code += "\nassert x.is_cuda and x.equal(same)"
    assert run(explanation.fix.apply(code), namespace=known) is None


@pytest.mark.parametrize(
    "call", ["np.interp(range(4), range(4), x.mean(1))", "PCA(2).fit(F.normalize(x))"]
)
def test_an_object_that_holds_no_tensor_hides_no_operand(call):
    code = (
        "import numpy as np\nfrom sklearn.decomposition import PCA\n"
        f"x = torch.rand(4, 3, device='cuda')\n{call}\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert run(fix.apply(code)) is None


@pytest.mark.parametrize(
    ("code", "fixed"),
    [
        (
            "x, mask = torch.ones(2, 3, device='cuda:1'), torch.ones(2) > 0\n"
            "x[mask] = torch.zeros(int(mask.sum()), 3)",
            "x[mask] = torch.zeros(int(mask.sum()), 3, device=x.device)",
        ),
        (
            "a, b = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4).cuda()\n"
            "d = (a[0].weight - b.weight).abs().max()",
            "d = (a[0].weight.to(b.weight.device) - b.weight).abs().max()",
        ),
    ],
)
def test_the_fix_is_at_the_odd_one_and_complete(code, fixed):
    explanation = gpumagic.explain(run(code))
    assert explanation.fix.code == fixed
    assert run(explanation.fix.apply(code)) is None


def test_what_a_class_reads_on_the_cpu_is_not_registered_with_another():
    code = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(2, 1)\n        self.scale = torch.ones(1)\n"
        "        self.total = torch.zeros(1)\n        self.sizes = torch.ones(2).long()\n"
        "        self.spare = torch.ones(1)\n    def forward(self, x):\n"
        "        y = self.fc(x) * self.scale\n        self.total += y.detach().sum().cpu()\n"
        "        return y.split(self.sizes.tolist())\nNet().cuda()(torch.ones(2, 2).cuda())\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code.strip() == 'self.register_buffer("scale", torch.ones(1), persistent=False)'
    assert run(fix.apply(code)) is None


def test_an_argument_of_another_call_is_no_link_of_a_chain():
    code = (
        "import numpy as np\nx = torch.ones(3, device='cuda')\n"
        "y = torch.dot(torch.from_numpy(np.log(x)).to('cuda'), x)\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == "y = torch.dot(torch.from_numpy(np.log(x.cpu())).to('cuda'), x)"
