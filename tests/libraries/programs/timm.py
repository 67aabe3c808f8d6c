# %% ResNet-18: a training step with batch norm
import timm

net, pictures = timm.create_model("resnet18", num_classes=5), torch.randn(2, 3, 32, 32)
labels = torch.tensor([1, 4])
net, pictures, labels = net.to("cuda:1"), pictures.to("cuda:1"), labels.to("cuda:1")  # own
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
# --
loss = torch.nn.functional.cross_entropy(net(pictures), labels)
loss.backward()
opt.step()
result = loss, list(net.state_dict().values())

# %% A vision transformer with dropped paths, trained
import timm

sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
net = timm.models.VisionTransformer(num_classes=5, drop_path_rate=0.3, drop_rate=0.1, **sizes)
pictures = torch.randn(4, 3, 32, 32)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
# --
loss = net.train()(pictures).square().mean()
loss.backward()
result = loss, [p.grad for p in net.parameters()]

# %% ConvNeXt: features, by channels last
import timm

net = timm.create_model("convnext_atto", num_classes=0).eval()
pictures = torch.randn(1, 3, 64, 64).to(memory_format=torch.channels_last)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
# --
with torch.no_grad():
    result = net.to(memory_format=torch.channels_last)(pictures)

# %% Mixup, a soft loss, and timm's optimizer and schedule
# placed: differs, because timm's LAMB takes another formula on a GPU
# earlier: differs, because timm's LAMB takes another formula on a GPU
# own: differs, because timm's LAMB takes another formula on a GPU
import timm
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

net = timm.create_model("test_resnet", num_classes=4)
pictures, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
net, pictures, labels = net.to("cuda:1"), pictures.to("cuda:1"), labels.to("cuda:1")  # own
opt = create_optimizer_v2(net, "lamb", lr=0.01)
schedule = CosineLRScheduler(opt, t_initial=3)
# --
mixed, soft = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4)(pictures, labels)
for epoch in range(3):
    opt.zero_grad()
    loss = SoftTargetCrossEntropy()(net(mixed), soft)
    loss.backward()
    opt.step()
    schedule.step(epoch + 1)
result = loss, list(net.parameters())

# %% A moving average of a model's weights
import timm
from timm.utils import ModelEmaV3

net, pictures = timm.create_model("test_vit", num_classes=4), torch.randn(2, 3, 160, 160)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
average = ModelEmaV3(net, decay=0.9)
# --
with torch.no_grad():
    for parameter in net.parameters():
        parameter.mul_(1.1)
average.update(net, step=3)
result = average.module.eval()(pictures)
