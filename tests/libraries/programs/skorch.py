# %% A classifier that is fitted
from skorch import NeuralNetClassifier
from torch import nn

layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(-1))
x, y = torch.randn(40, 6).cpu().numpy(), torch.randint(0, 2, (40,)).cpu().numpy()
# --
device = "cuda" if torch.cuda.is_available() else "cpu"
device = "cuda:1"  # own
net = NeuralNetClassifier(layers, max_epochs=3, lr=0.1, verbose=0, train_split=None, device=device)
net.fit(x, y)
result = net.predict_proba(x), list(net.module_.parameters())

# %% A net that was fitted in an earlier cell predicts
# placed: elsewhere, because skorch takes no device but "cpu" for its default
import numpy as np
from skorch import NeuralNetRegressor
from torch import nn

x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
net = NeuralNetRegressor(nn.Linear(1, 1), max_epochs=4, lr=0.1, verbose=0, train_split=None)
net.set_params(device="cuda:1")  # own
net.fit(x, 2 * x)
# --
result = net.predict(x), list(net.module_.parameters())

# %% A grid search by scikit-learn
import numpy as np
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int64)
# --
device = "cuda" if torch.cuda.is_available() else "cpu"
device = "cuda:1"  # own
layers = nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))
net = NeuralNetClassifier(layers, max_epochs=2, verbose=0, train_split=None, device=device)
search = GridSearchCV(net, {"lr": [0.01, 0.5]}, cv=2, scoring="accuracy").fit(x, y)
result = search.best_params_["lr"], search.cv_results_["mean_test_score"]
