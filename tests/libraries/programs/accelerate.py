# %% Accelerator: two epochs
# own: picks
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
data = TensorDataset(torch.randn(16, 6), torch.randint(0, 2, (16,)))
# --
accelerator = Accelerator()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
net, opt, loader = accelerator.prepare(net, opt, DataLoader(data, batch_size=4))
for _ in range(2):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
result = accelerator.gather(loss.detach()), list(net.parameters())

# %% Accelerator: gradients accumulated and clipped
# own: picks
from accelerate import Accelerator

net, x = torch.nn.Linear(6, 2), torch.randn(8, 6)
# --
accelerator = Accelerator(gradient_accumulation_steps=2)
net, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for part in x.split(2):
    with accelerator.accumulate(net):
        loss = net(part.to(accelerator.device)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
result = loss.detach(), list(net.parameters())

# %% An empty model that is filled, with hooks between its devices
# own: picks
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights

with init_empty_weights():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
# --
net = net.to_empty(device="cpu")
for n, parameter in enumerate(net.parameters()):
    torch.nn.init.constant_(parameter, 0.1 * (n + 1))
free = dict.fromkeys(range(torch.cuda.device_count()), 17_000)
if free:
    net = dispatch_model(net, infer_auto_device_map(net, max_memory=free | {"cpu": 10**9}))
result = net(torch.ones(2, 64))

# %% Seeds, sends and pads of accelerate's own
from accelerate.utils import pad_across_processes, send_to_device, set_seed

batch = {"x": [torch.ones(2, 3), torch.zeros(4)], "n": 3}
batch = send_to_device(batch, "cuda:1")  # own
# --
set_seed(5)
noise = torch.randn(2, 3, device=batch["x"][0].device)
result = batch, pad_across_processes(batch["x"][0] + noise)
