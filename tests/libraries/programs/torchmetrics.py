# %% Accuracy and F1, over batches
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

metrics = MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)])
scores, labels = torch.randn(3, 8, 4), torch.randint(0, 4, (3, 8))
metrics, scores, labels = metrics.to("cuda:1"), scores.to("cuda:1"), labels.to("cuda:1")  # own
# --
for batch in range(3):
    metrics.update(scores[batch], labels[batch])
result = metrics.compute()

# %% A curve, its area and a confusion matrix
from torchmetrics.classification import BinaryAUROC, BinaryROC, MulticlassConfusionMatrix

area, curve, matrix = BinaryAUROC(), BinaryROC(), MulticlassConfusionMatrix(3)
scores, labels, classes = torch.rand(30), torch.randint(0, 2, (30,)), torch.randint(0, 3, (30,))
area, curve, matrix = area.to("cuda:1"), curve.to("cuda:1"), matrix.to("cuda:1")  # own
scores, labels, classes = scores.to("cuda:1"), labels.to("cuda:1"), classes.to("cuda:1")  # own
# --
area.update(scores, labels)
result = area.compute(), curve(scores, labels), matrix(classes, classes.flip(0))

# %% Errors and correlations of a regression
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score, SpearmanCorrCoef

metrics = [MeanSquaredError(), PearsonCorrCoef(), R2Score(), SpearmanCorrCoef()]
guess, truth = torch.randn(40), torch.randn(40)
metrics = [metric.to("cuda:1") for metric in metrics]  # own
guess, truth = guess.to("cuda:1"), truth.to("cuda:1")  # own
# --
for metric in metrics:
    metric.update(guess, truth)
result = [metric.compute() for metric in metrics]

# %% The likeness of pictures
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure

ratio, likeness = (
    PeakSignalNoiseRatio(data_range=1.0),
    StructuralSimilarityIndexMeasure(data_range=1.0),
)
one, other = torch.rand(2, 3, 24, 24), torch.rand(2, 3, 24, 24)
ratio, likeness = ratio.to("cuda:1"), likeness.to("cuda:1")  # own
one, other = one.to("cuda:1"), other.to("cuda:1")  # own
# --
result = ratio(one, other), likeness(one, other)
