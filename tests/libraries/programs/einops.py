# %% Rearrange, reduce and repeat
from einops import rearrange, reduce, repeat

pictures = torch.randn(2, 3, 8, 8)
pictures = pictures.to("cuda:1")  # own
# --
patches = rearrange(pictures, "b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
result = (
    patches,
    reduce(patches, "b n c -> b c", "max"),
    repeat(pictures[0], "c h w -> k c h w", k=2),
)

# %% Layers: patches embedded by a mixed product
from einops.layers.torch import EinMix, Rearrange

cut = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
mix = EinMix("b n c -> b n d", weight_shape="c d", bias_shape="d", c=48, d=16)
net, pictures = torch.nn.Sequential(cut, mix), torch.randn(2, 3, 8, 8)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
# --
out = net(pictures)
out.square().sum().backward()
result = out, [p.grad for p in net.parameters()]

# %% einsum, pack and unpack
from einops import einsum, pack, unpack

one, other = torch.randn(2, 3, 4), torch.randn(4, 5)
one, other = one.to("cuda:1"), other.to("cuda:1")  # own
# --
product = einsum(one, other, "b i j, j k -> b i k")
packed, shapes = pack([product, torch.zeros(2, 5, device=product.device)], "b * k")
result = packed, unpack(packed, shapes, "b * k")
