# %% DDPM: a picture from noise
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
unet = UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, **blocks)
pipe = DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=10))
pipe.to("cuda:1")  # own
pipe.set_progress_bar_config(disable=True)
# --
images = pipe(batch_size=1, num_inference_steps=3, output_type="np").images
result = images, list(pipe.unet.parameters())

# %% UNet: a training step against the noise that was added
from diffusers import DDPMScheduler, UNet2DModel

blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
down, up = ("DownBlock2D", "DownBlock2D"), ("UpBlock2D", "UpBlock2D")
net = UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, **blocks)
pictures, schedule = torch.randn(2, 3, 16, 16), DDPMScheduler(num_train_timesteps=50)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
# --
noise, steps = torch.randn_like(pictures), torch.randint(0, 50, (2,), device=pictures.device)
seen = schedule.add_noise(pictures, noise, steps)
loss = torch.nn.functional.mse_loss(net(seen, steps).sample, noise)
loss.backward()
result = loss, [p.grad for p in net.parameters()]

# %% A conditional UNet with cross-attention
from diffusers import UNet2DConditionModel

blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
net = UNet2DConditionModel(
    sample_size=8,
    down_block_types=down,
    up_block_types=up,
    cross_attention_dim=16,
    attention_head_dim=4,
    **blocks,
)
latent, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 16)
net, latent, text = net.to("cuda:1"), latent.to("cuda:1"), text.to("cuda:1")  # own
# --
result = net(latent, 3, encoder_hidden_states=text).sample

# %% An autoencoder: encode, sample, decode
from diffusers import AutoencoderKL

blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 2}
down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
net = AutoencoderKL(down_block_types=down, up_block_types=up, **blocks)
pictures = torch.randn(2, 3, 16, 16)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
# --
latent = net.encode(pictures).latent_dist.sample()
result = latent, net.decode(latent).sample

# %% DDIM's scheduler, step by step
from diffusers import DDIMScheduler

schedule, sample = DDIMScheduler(num_train_timesteps=20), torch.randn(1, 3, 8, 8)
sample = sample.to("cuda:1")  # own
# --
schedule.set_timesteps(5)
for step in schedule.timesteps:
    sample = schedule.step(sample * 0.1, step, sample).prev_sample
result = sample

# %% Euler's scheduler and a transformer for pictures
from diffusers import DiTTransformer2DModel, EulerDiscreteScheduler

sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "patch_size": 2}
net = DiTTransformer2DModel(in_channels=4, sample_size=8, norm_num_groups=4, **sizes).eval()
sample, label = torch.randn(1, 4, 8, 8), torch.tensor([3])
net, sample, label = net.to("cuda:1"), sample.to("cuda:1"), label.to("cuda:1")  # own
schedule = EulerDiscreteScheduler(num_train_timesteps=20)
# --
schedule.set_timesteps(3, device=sample.device)
with torch.no_grad():
    for step in schedule.timesteps:
        scaled = schedule.scale_model_input(sample, step)
        guess = net(scaled, timestep=step[None].long(), class_labels=label).sample
        sample = schedule.step(guess[:, :4], step, sample).prev_sample
result = sample
