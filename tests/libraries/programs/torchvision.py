# %% MobileNet: a training step
import torchvision

net = torchvision.models.mobilenet_v3_small(num_classes=5)
pictures, labels = torch.randn(2, 3, 64, 64), torch.tensor([1, 4])
net, pictures, labels = net.to("cuda:1"), pictures.to("cuda:1"), labels.to("cuda:1")  # own
opt = torch.optim.Adam(net.parameters())
# --
loss = torch.nn.functional.cross_entropy(net(pictures), labels)
loss.backward()
opt.step()
result = loss, list(net.parameters())

# %% Transforms of a batch: crops, flips, colors
from torchvision.transforms import v2

pictures = torch.rand(4, 3, 32, 32)
pictures = pictures.to("cuda:1")  # own
change = v2.Compose(
    [
        v2.RandomResizedCrop(24, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.2),
        v2.GaussianBlur(3),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ]
)
# --
result = change(pictures)

# %% Boxes: overlaps, suppression, pooled regions
from torchvision import ops

corners = torch.rand(20, 2) * 10
boxes, scores, features = (
    torch.cat([corners, corners + 5], 1),
    torch.rand(20),
    torch.randn(1, 4, 16, 16),
)
boxes, scores, features = boxes.to("cuda:1"), scores.to("cuda:1"), features.to("cuda:1")  # own
# --
kept = ops.nms(boxes, scores, 0.3)
result = kept, ops.box_iou(boxes, boxes), ops.roi_align(features, [boxes[kept]], 3)

# %% Faster R-CNN: a training step, then detection
import torchvision

given = {
    "weights": None,
    "weights_backbone": None,
    "num_classes": 3,
    "min_size": 64,
    "max_size": 64,
}
net = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(**given)
picture, box, label = torch.rand(3, 64, 64), torch.tensor([[8.0, 8, 40, 40]]), torch.tensor([1])
net, picture, box, label = (x.to("cuda:1") for x in (net, picture, box, label))  # own
# --
losses = net.train()([picture], [{"boxes": box, "labels": label}])
sum(losses.values()).backward()
result = list(losses.values()), net.eval()([picture])

# %% DeepLab: a label for each pixel
import torchvision

given = {"weights": None, "weights_backbone": None, "num_classes": 4}
net = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(**given).eval()
pictures = torch.randn(1, 3, 64, 64)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
# --
with torch.no_grad():
    out = net(pictures)["out"]
result = out, out.argmax(1)

# %% A DataLoader of pictures that PIL made
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import resnet18
from torchvision.transforms import v2

read = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
net, data = resnet18(num_classes=3), FakeData(8, (3, 32, 32), 3, read)
net = net.to("cuda:1")  # own
loader, opt = DataLoader(data, batch_size=4), torch.optim.SGD(net.parameters(), lr=0.1)
# --
home = next(net.parameters()).device
for pictures, labels in loader:
    loss = torch.nn.functional.cross_entropy(net(pictures.to(home)), labels.to(home))
    opt.zero_grad()
    loss.backward()
    opt.step()
result = loss, list(net.parameters())
