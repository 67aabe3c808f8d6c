# %% BERT: a training step
from transformers import BertConfig, BertForSequenceClassification

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
net = BertForSequenceClassification(BertConfig(vocab_size=99, intermediate_size=64, **sizes))
ids, labels = torch.randint(1, 99, (4, 12)), torch.tensor([0, 1, 0, 1])
net, ids, labels = net.to("cuda:1"), ids.to("cuda:1"), labels.to("cuda:1")  # own
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
# --
out = net(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
out.loss.backward()
opt.step()
result = out.loss, [p.grad for p in net.parameters()], list(net.parameters())

# %% BERT: filling a mask, without a gradient
from transformers import BertConfig, BertForMaskedLM

config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
net = BertForMaskedLM(config).eval()
ids = torch.randint(1, 99, (2, 9))
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
# --
with torch.no_grad():
    result = net(ids, attention_mask=(ids > 9).long(), output_hidden_states=True).hidden_states

# %% GPT-2: sampled generation
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
net = GPT2LMHeadModel(config).eval()
ids = torch.randint(3, 99, (2, 5))
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
# --
result = net.generate(ids, max_new_tokens=8, do_sample=True, top_k=20, pad_token_id=0)

# %% Llama: beam search with a cache
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
net = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_attention_heads=4, **sizes)).eval()
ids = torch.randint(3, 99, (2, 5))
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
# --
result = net.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0)

# %% Llama: a cache that is carried on from one call to the next
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
net = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_attention_heads=4, **sizes)).eval()
ids, cache = torch.randint(3, 99, (2, 5)), DynamicCache()
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
with torch.no_grad():
    net(ids, past_key_values=cache, use_cache=True)
# --
with torch.no_grad():
    result = net(ids[:, :1], past_key_values=cache, use_cache=True).logits

# %% Mixtral: a mixture of experts, forward and backward
from transformers import MixtralConfig, MixtralForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
net = MixtralForCausalLM(MixtralConfig(vocab_size=99, **sizes, **heads))
ids = torch.randint(0, 98, (2, 6))
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
# --
loss = net(ids, labels=ids).loss
loss.backward()
result = loss, [p.grad for p in net.parameters()]

# %% T5: a training step of an encoder and a decoder
from transformers import T5Config, T5ForConditionalGeneration

sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
net = T5ForConditionalGeneration(T5Config(vocab_size=99, decoder_start_token_id=0, **sizes))
ids = torch.randint(3, 99, (2, 7))
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
# --
loss = net(input_ids=ids, labels=ids).loss
loss.backward()
result = loss, net.shared.weight.grad

# %% CLIP: texts and pictures
from transformers import CLIPConfig, CLIPModel

small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
text = small | {"num_attention_heads": 2, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
vision = small | {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
net = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()
ids, pictures = torch.randint(3, 99, (2, 6)), torch.randn(3, 3, 16, 16)
net, ids, pictures = net.to("cuda:1"), ids.to("cuda:1"), pictures.to("cuda:1")  # own
# --
result = net(input_ids=ids, pixel_values=pictures).logits_per_image

# %% ViT: half precision by autocast
from transformers import ViTConfig, ViTForImageClassification

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = ViTConfig(image_size=16, patch_size=8, num_attention_heads=2, **sizes)
net, pictures = ViTForImageClassification(config).eval(), torch.randn(2, 3, 16, 16)
net, pictures = net.to("cuda:1"), pictures.to("cuda:1")  # own
# --
with torch.autocast(pictures.device.type, torch.bfloat16):
    result = net(pictures).logits

# %% Whisper: features of a sound by NumPy, then generation
import numpy as np
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

layers = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "vocab_size": 99}
heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 20}
tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
config = WhisperConfig(max_source_positions=50, **layers, **heads, **tokens)
net = WhisperForConditionalGeneration(config).eval()
net = net.to("cuda:1")  # own
extract = WhisperFeatureExtractor(feature_size=20, chunk_length=1, sampling_rate=16000)
sound = np.sin(np.arange(16000) / 20)
# --
features = extract(sound, sampling_rate=16000, return_tensors="pt").input_features
result = net.generate(features.to(net.device), max_new_tokens=5)

# %% from_pretrained, from a folder
import tempfile

from transformers import BertConfig, BertModel

folder = tempfile.mkdtemp()
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BertModel(BertConfig(vocab_size=9, intermediate_size=16, **small)).save_pretrained(folder)
# --
net = BertModel.from_pretrained(folder)
net = net.to("cuda:1")  # own
result = net(torch.tensor([[1, 2, 3]], device=net.device)).last_hidden_state

# %% Trainer: four steps
# own: differs, because Trainer splits its batches over all GPUs
import tempfile

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
small |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # a GPU draws its own
net = BertForSequenceClassification(BertConfig(vocab_size=9, intermediate_size=16, **small))
rows = [{"input_ids": [i % 9] * 8, "labels": i % 2} for i in range(16)]
# --
given = {"report_to": [], "max_steps": 4, "disable_tqdm": True, "save_strategy": "no"}
trainer = Trainer(
    model=net, args=TrainingArguments(tempfile.mkdtemp(), **given), train_dataset=rows
)
loss = trainer.train().training_loss
result = loss, [p.detach() for p in net.parameters()]

# %% A pipeline that was made in an earlier cell
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    TextClassificationPipeline,
)

words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "good": 3, "bad": 4, "film": 5}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
net = BertForSequenceClassification(BertConfig(vocab_size=6, intermediate_size=16, **small))
pipe = TextClassificationPipeline(model=net.eval(), tokenizer=fast)
pipe = TextClassificationPipeline(model=net, tokenizer=fast, device="cuda:1")  # own
# --
result = pipe(["a good film", "a bad film film"]), list(pipe.model.parameters())
