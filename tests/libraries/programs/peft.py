# %% LoRA: three steps, then merged
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

base = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2))
net = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
ids = torch.randint(3, 99, (2, 8))
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
# --
for _ in range(3):
    opt.zero_grad()
    loss = net(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
result = loss, list(net.merge_and_unload().parameters())

# %% IA3 on T5
from peft import IA3Config, TaskType, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 1, "num_heads": 4}
base = T5ForConditionalGeneration(T5Config(vocab_size=99, decoder_start_token_id=0, **sizes))
parts = {"target_modules": ["k", "v", "wo"], "feedforward_modules": ["wo"]}
net = get_peft_model(base, IA3Config(task_type=TaskType.SEQ_2_SEQ_LM, **parts))
ids = torch.randint(3, 99, (2, 7))
net, ids = net.to("cuda:1"), ids.to("cuda:1")  # own
# --
loss = net(input_ids=ids, labels=ids).loss
loss.backward()
result = loss, [p.grad for p in net.parameters() if p.requires_grad]

# %% Prompt tuning, saved and loaded again
import tempfile

from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2)
base, folder = GPT2LMHeadModel(config).eval(), tempfile.mkdtemp()
tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
get_peft_model(base, tuning).save_pretrained(folder)
ids = torch.randint(3, 99, (2, 4))
base, ids = base.to("cuda:1"), ids.to("cuda:1")  # own
# --
net = PeftModel.from_pretrained(base, folder)
result = net(input_ids=ids).logits
