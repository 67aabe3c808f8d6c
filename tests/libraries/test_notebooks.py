"""Notebooks that other people's libraries once led astray, each in a Python of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
RUN = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
for name in {missing!r}:
    sys.modules[name] = None
import gpumagic
gpumagic.virtual.enable(2, "4GiB")
from conftest import Shell
del sys.path[0]
shell = Shell()
shell.ip.run_line_magic("load_ext", "gpumagic")
shell.run("import torch; from torch import nn")
print(json.dumps([shell.run(cell).text for cell in {cells!r}]))
"""


def shown(*cells, missing=()):
    """What the cells of a new notebook show, on two virtual GPUs; `missing` is not installed."""
    code = RUN.format(tests=str(Path(__file__).parents[1]), cells=cells, missing=missing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SMALL = "vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2"
SAVED = f"""import tempfile
from transformers import BertConfig, BertModel
folder = tempfile.mkdtemp()
BertModel(BertConfig({SMALL}, intermediate_size=16)).save_pretrained(folder)
"""
LOAD = "net = BertModel.from_pretrained(folder)\nprint('net is on', net.device)"


def test_from_pretrained_needs_no_accelerate():
    _, placed, plain = shown(SAVED, f"%%ongpu 1\n{LOAD}", LOAD, missing=["accelerate"])
    assert "net is on cuda:1" in placed
    assert "net is on cpu" in plain
    (at_once,) = shown(f"%%ongpu 1\n{SAVED}{LOAD}", missing=["accelerate"])
    assert "net is on cuda:1" in at_once


def test_torchvision_that_is_imported_later_uses_no_kernel_of_a_real_gpu():
    _, kept, mixed = shown(
        "boxes, scores = torch.zeros(2, 4).cuda(), torch.tensor([0.2, 1])",
        "from torchvision.ops import nms\nnms(boxes, scores.cuda(), 0.5)",
        "nms(boxes, scores, 0.5)",
    )
    assert "device='cuda:0'" in kept
    assert "scores  cpu" in mixed
    assert "nms(boxes, scores.to(boxes.device), 0.5)" in mixed


def test_a_dry_run_overwrites_no_file_through_a_writer_in_c(tmp_path):
    path = str(tmp_path / "x.parquet")
    *_, dry, after = shown(
        f"import pandas as pd\npath = {path!r}\npd.DataFrame({{'a': [1, 2]}}).to_parquet(path)",
        "new = pd.DataFrame({'b': [9]})",
        "%%ongpu 1 --dry-run\nnew.to_parquet(path)",
        "print(pd.read_parquet(path).to_dict())",
    )
    assert "a dry run writes no file" in dry
    assert "{'a': {0: 1, 1: 2}}" in after


def test_a_pipeline_of_an_earlier_cell_computes_there_and_the_report_says_so():
    *_, placed = shown(
        "from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel\n"
        "blocks = {'block_out_channels': (8, 16), 'norm_num_groups': 4}\n"
        "down, up = ('DownBlock2D',) * 2, ('UpBlock2D',) * 2\n"
        "pipe = DDPMPipeline(\n"
        "    UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, **blocks),\n"
        "    DDPMScheduler(num_train_timesteps=10),\n"
        ")\npipe.set_progress_bar_config(disable=True)",
        "%%ongpu 1\nimages = pipe(num_inference_steps=2, output_type='np').images\n"
        "print('computed on', pipe.unet.device)",
    )
    assert "computed on cuda:1" in placed
    assert "moved pipe" in placed


def test_a_spectrogram_is_made_there_whose_window_is_made_by_a_default_argument():
    _, placed = shown(
        "import torchaudio",
        "%%ongpu 1\nmel = torchaudio.transforms.MelSpectrogram(8000, n_fft=64, n_mels=8)\n"
        "print(mel.spectrogram.window.device, mel(torch.randn(800)).device)",
    )
    assert "cuda:1 cuda:1" in placed


def test_a_graph_comes_along_and_its_error_names_the_users_line():
    made = (
        "from torch_geometric.data import Data\nfrom torch_geometric.nn import GCNConv\n"
        "data = Data(x=torch.randn(5, 6), edge_index=torch.randint(0, 5, (2, 8)))\n"
        "conv = GCNConv(6, 2)"
    )
    _, placed = shown(made, "%%ongpu 1\nconv(data.x, data.edge_index).device")
    assert "device(type='cuda', index=1)" in placed
    assert "moved conv, data" in placed
    *_, error = shown(made, "x, conv = data.x.cuda(), conv.cuda()", "conv(x, data.edge_index)")
    assert "line 1: conv(x, data.edge_index)" in error
    assert "conv(x, data.to(x.device).edge_index)" in error


NET = f"""import tempfile
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
net = BertForSequenceClassification(BertConfig({SMALL}, intermediate_size=16))
rows = [{{"input_ids": [1, 2], "labels": 0}}] * 4
given = {{"report_to": [], "max_steps": 2, "disable_tqdm": True, "save_strategy": "no"}}"""
TRAINER = """args = TrainingArguments(tempfile.mkdtemp(), **given)
trainer = Trainer(model=net, args=args, train_dataset=rows)"""
TRAIN = "_ = trainer.train()\nprint('trained on', args.device, args.n_gpu, net.device)"
USED = "print([torch.cuda.memory_stats(n)['allocation.all.allocated'] > 0 for n in (0, 1)])"


def test_a_trainer_uses_the_cells_gpu_alone():
    _, placed, used = shown(NET, f"%%ongpu 1\n{TRAINER}\n{TRAIN}", USED)
    assert "trained on cuda:1 1 cuda:1" in placed
    assert "transformers' cuda:0 was replaced by cuda:1" in placed
    assert "[False, True]" in used


def test_a_trainer_of_an_earlier_cell_comes_along_and_goes_home():
    *_, placed, plain, _, home = shown(
        NET, TRAINER, f"%%ongpu 1\n{TRAIN}", TRAIN, "%ongpu home", "print(args.device, args.n_gpu)"
    )
    assert "trained on cuda:1 1 cuda:1" in placed
    assert "trainer's cuda:0 was replaced by cuda:1" in placed
    assert "trained on cuda:1 1 cuda:1" in plain
    assert "cuda:0 2" in home


def test_lightnings_trainer_of_an_earlier_cell_comes_along():
    _, first, second = shown(
        """import lightning as L
from torch.utils.data import DataLoader, TensorDataset
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)
    def training_step(self, batch, index):
        self.trained_on = batch[0].device
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
loader = DataLoader(TensorDataset(torch.randn(16, 6)), batch_size=4)
net, trainer = Net(), L.Trainer(max_epochs=1, enable_checkpointing=False, **quiet)""",
        "%%ongpu 1\ntrainer.fit(net, loader)\nprint('trained on', net.trained_on)",
        "trainer.fit_loop.max_epochs = 2\ntrainer.fit(net, loader)\nprint(net.trained_on)",
    )
    assert "trained on cuda:1" in first
    assert "trainer's cuda:0" in first
    assert "cuda:1" in second


def test_a_device_map_of_two_gpus_is_the_users_wish():
    made = "BertModel.from_pretrained(folder, device_map={})"
    two = '{"embeddings": 0, "encoder": 1, "pooler": 1}'
    _, first, named, both = shown(
        SAVED,
        f"%%ongpu 1\nprint({made.format({'': 0})}.device)",
        f"%%ongpu 1\nprint({made.format(repr('cuda:0'))}.device)",
        f"%%ongpu 1\nprint(sorted({{str(p.device) for p in {made.format(two)}.parameters()}}))",
    )
    assert "cuda:1\n" in first
    assert "transformers' cuda:0 was replaced by cuda:1" in first
    assert "cuda:0\n" in named
    assert "replaced by" not in named
    assert "['cuda:0', 'cuda:1']" in both


def test_a_model_dispatched_over_two_gpus_runs_under_any_placement():
    made = """from accelerate import dispatch_model
layers = [nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)]
def dispatched(a, b):
    return dispatch_model(nn.Sequential(*layers), {"0": a, "1": b, "2": a})
nets, ids = [dispatched(0, 1), dispatched("cuda:0", "cuda:1")], torch.arange(3)"""
    shows = "print([net(ids.to(1)).device.index for net in nets])"
    _, here, _, later = shown(
        made, f"%%ongpu 1\n{shows}", "%%ongpu 1\nnets = [dispatched(0, 1)]", f"%%ongpu 0\n{shows}"
    )
    assert "[1, 1]" in here
    assert "replaced by" not in here
    assert "[1]" in later
