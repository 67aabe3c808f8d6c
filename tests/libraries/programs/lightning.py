# %% A Trainer of Lightning: fit
# own: picks
import lightning as L
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)

    def training_step(self, batch, index):
        x, y = batch
        self.trained_on = x.device  # afterwards Lightning brings the network back to the CPU
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
net, data = Net(), TensorDataset(torch.randn(16, 6), torch.randint(0, 2, (16,)))
# --
trainer = L.Trainer(max_epochs=2, enable_checkpointing=False, devices=1, **quiet)
trainer.fit(net, DataLoader(data, batch_size=4))
result = [p.to(net.trained_on) for p in net.parameters()]

# %% A Trainer of Lightning that is told its device, with validation and a metric
import lightning as L
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch, index):
        self.trained_on = batch[0].device  # afterwards Lightning brings the network to the CPU
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.accuracy(self.layer(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
net, data = Net(), TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))
where = {"accelerator": "gpu" if torch.cuda.is_available() else "cpu", "devices": 1}
where = {"accelerator": "gpu", "devices": [1]}  # own
# --
trainer = L.Trainer(max_epochs=2, enable_checkpointing=False, **where, **quiet)
trainer.fit(net, DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
result = [trainer.callback_metrics["accuracy"], *net.parameters()]
result = [value.to(net.trained_on) for value in result]

# %% A LightningModule in a loop of one's own
import lightning as L


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)

    def forward(self, x):
        return self.layer(x + torch.zeros(6, device=self.device))


net, x = Net(), torch.randn(4, 6)
net, x = net.to("cuda:1"), x.to("cuda:1")  # own
# --
L.seed_everything(3, verbose=False)
result = net(x + torch.randn_like(x)), torch.ones(2, device=net.device)

# %% Fabric: a step
# own: picks
from lightning.fabric import Fabric

net, x = torch.nn.Linear(6, 2), torch.randn(4, 6)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
# --
fabric = Fabric(devices=1)
net, opt = fabric.setup(net, opt)
loss = net(fabric.to_device(x)).square().mean()
fabric.backward(loss)
opt.step()
result = loss, list(net.parameters())
