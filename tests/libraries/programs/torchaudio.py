# %% A mel spectrogram in decibels
import torchaudio.transforms as T

sound = torch.randn(2, 1600)
mel, decibels = T.MelSpectrogram(8000, n_fft=64, n_mels=8), T.AmplitudeToDB()
sound, mel = sound.to("cuda:1"), mel.to("cuda:1")  # own
# --
result = decibels(mel(sound))

# %% MFCC, deltas and a sliding mean
import torchaudio.transforms as T
from torchaudio.functional import compute_deltas

sound = torch.randn(1, 1600)
mfcc = T.MFCC(8000, n_mfcc=6, melkwargs={"n_fft": 64, "n_mels": 12})
sound, mfcc = sound.to("cuda:1"), mfcc.to("cuda:1")  # own
# --
features = mfcc(sound)
result = compute_deltas(features), T.SlidingWindowCmn()(features)

# %% Resampling and a filter
# placed: fails, because torchaudio's Resample names the CPU in a default argument
import torchaudio

sound = torch.randn(1, 1600)
resample = torchaudio.transforms.Resample(8000, 6000)
sound, resample = sound.to("cuda:1"), resample.to("cuda:1")  # own
# --
result = torchaudio.functional.lowpass_biquad(resample(sound), 6000, 1000.0)

# %% A spectrogram there and back, by Griffin and Lim
import torchaudio.transforms as T

sound = torch.sin(torch.arange(800) / 5.0)[None]
to, back = T.Spectrogram(n_fft=64), T.GriffinLim(n_fft=64, n_iter=4)
sound, to, back = sound.to("cuda:1"), to.to("cuda:1"), back.to("cuda:1")  # own
# --
result = back(to(sound))

# %% Wav2Vec2: a training step with CTC
# own: differs, because layers are dropped by the CPU's generator, values by the GPU's
import torchaudio

base = {"encoder_embed_dim": 16, "encoder_num_layers": 1, "encoder_num_heads": 2}
net = torchaudio.models.wav2vec2_model(
    extractor_mode="group_norm",
    extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
    extractor_conv_bias=False,
    encoder_projection_dropout=0.0,
    encoder_pos_conv_kernel=8,
    encoder_pos_conv_groups=2,
    encoder_attention_dropout=0.0,
    encoder_ff_interm_features=32,
    encoder_ff_interm_dropout=0.1,
    encoder_dropout=0.1,
    encoder_layer_norm_first=False,
    encoder_layer_drop=0.0,
    aux_num_out=6,
    **base,
)
sound, words = torch.randn(2, 800), torch.tensor([[1, 2, 3], [4, 5, 1]])
net, sound, words = net.to("cuda:1"), sound.to("cuda:1"), words.to("cuda:1")  # own
# --
logits, _ = net(sound)
steps, letters = torch.tensor([logits.shape[1]] * 2), torch.tensor([3, 3])
scores = logits.log_softmax(-1).transpose(0, 1)
loss = torch.nn.functional.ctc_loss(scores, words, steps, letters)
loss.backward()
result = loss, [p.grad for p in net.parameters()]
