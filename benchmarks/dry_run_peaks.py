"""Compare dry runs' peaks with what virtual GPUs measure: a training step of public architectures.

    python benchmarks/dry_run_peaks.py [--only NAME ...] [--write]

Each model is built from its library's configuration, with few layers and small inputs, for it runs
on the CPU. A step is forward, backward and the optimizer's; its peak is predicted first and then
measured by torch.cuda.memory_stats, twice in a row: the first makes the optimizer's state. Prints a
table and, with --write, puts it into docs/dry-runs.md. Ends with 1 if one is off by more
than 2 %, or a library is not installed: its models are counted, and `make test-libraries` installs
what they need into .venv-libraries.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpumagic

MOST = 0.02
PAGE = Path(__file__).parents[1] / "docs" / "dry-runs.md"
TABLE = re.compile(r"(?<=<!-- benchmarks/dry_run_peaks.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
CAPACITY = "8GiB"
WHERE = "cuda:0"
"""What stands in the place of a GPU."""


@dataclass(frozen=True)
class Architecture:
    """A model of a library, and what goes in."""

    library: str
    name: str
    make: Callable[[Any], nn.Module]  # given the library
    inputs: Callable[[], dict[str, Any]]  # by the name of forward's parameter, or "" for the first

    @property
    def installed(self) -> bool:
        """Whether its library is here."""
        return find_spec(self.library) is not None


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of the first thing that it gives."""
    own = getattr(output, "loss", None)
    if own is not None:
        return own
    first = next(iter(output.values())) if isinstance(output, dict) else output
    return first.float().square().mean()


def step(model: nn.Module, optimizer: Any, given: dict[str, Any]) -> None:
    """Forward, backward, optimizer."""
    optimizer.zero_grad()
    first = [given[""]] if "" in given else []
    output = model(*first, **{name: value for name, value in given.items() if name})
    loss_of(output).backward()
    optimizer.step()


def images(size: int = 64, batch: int = 4, channels: int = 3) -> dict[str, Any]:
    """A batch for a model that sees."""
    return {"": torch.randn(batch, channels, size, size)}


def words(length: int = 64, batch: int = 4, vocabulary: int = 1000, **more: Any) -> dict[str, Any]:
    """A batch for a model that reads, with labels."""
    tokens = torch.randint(2, vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def vision(name: str, size: int = 64, batch: int = 4, **options: Any) -> Architecture:
    """One of torchvision's."""
    return Architecture(
        "torchvision",
        name,
        lambda library: getattr(library.models, name)(weights=None, **options),
        lambda: images(size, batch),
    )


def timm(name: str, size: int = 64, batch: int = 4, **options: Any) -> Architecture:
    """One of timm's."""
    return Architecture(
        "timm",
        name,
        lambda library: library.create_model(name, num_classes=100, **options),
        lambda: images(size, batch),
    )


def language(config: str, model: str, inputs: Any = words, **options: Any) -> Architecture:
    """One of transformers'."""

    def make(library: Any) -> nn.Module:
        return getattr(library, model)(getattr(library, config)(**options))

    return Architecture("transformers", model, make, inputs)


SMALL = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MODERN = {**SMALL, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32}
BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}


def unet() -> dict[str, Any]:
    """What a conditional U-Net takes."""
    return {
        "": torch.randn(2, 4, 32, 32),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 16, 64),
    }


def diffusion(name: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> Architecture:
    """One of diffusers'."""
    return Architecture("diffusers", name, lambda lib: getattr(lib, name)(**options), inputs)


ARCHITECTURES = [
    vision("resnet18"),
    vision("resnet50"),
    vision("vgg11_bn"),
    vision("mobilenet_v3_small"),
    vision("efficientnet_b0"),
    vision("densenet121", batch=2),
    vision("convnext_tiny"),
    vision("regnet_y_400mf"),
    vision("shufflenet_v2_x1_0"),
    vision("vit_b_16", image_size=64),
    vision("swin_t"),
    timm("deit_tiny_patch16_224", img_size=64),
    timm("mixer_s32_224", size=224, batch=2),
    timm("resnetv2_50"),
    timm("poolformer_s12"),
    language("BertConfig", "BertForMaskedLM", intermediate_size=256, **SMALL),
    language(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        vocab_size=1000,
        dim=128,
        n_layers=2,
        n_heads=4,
        hidden_dim=256,
    ),
    language(
        "AlbertConfig", "AlbertForMaskedLM", intermediate_size=256, embedding_size=64, **SMALL
    ),
    language("ElectraConfig", "ElectraForMaskedLM", intermediate_size=256, **SMALL),
    language("GPT2Config", "GPT2LMHeadModel", vocab_size=1000, n_embd=128, n_layer=2, n_head=4),
    language("OPTConfig", "OPTForCausalLM", ffn_dim=256, word_embed_proj_dim=128, **SMALL),
    language("LlamaConfig", "LlamaForCausalLM", **MODERN),
    language("MistralConfig", "MistralForCausalLM", **MODERN),
    language("Qwen3Config", "Qwen3ForCausalLM", **MODERN),
    language("Gemma2Config", "Gemma2ForCausalLM", **MODERN),
    language(
        "T5Config",
        "T5ForConditionalGeneration",
        vocab_size=1000,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    language(
        "BartConfig",
        "BartForConditionalGeneration",
        vocab_size=1000,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
    ),
    language(
        "ViTConfig",
        "ViTForImageClassification",
        lambda: {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.tensor([0, 1, 0, 1])},
        image_size=64,
        patch_size=8,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
    ),
    language(
        "Wav2Vec2Config",
        "Wav2Vec2Model",
        lambda: {"": torch.randn(2, 8000)},
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        intermediate_size=256,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
        layerdrop=0.0,
        **SMALL,
    ),
    diffusion(
        "UNet2DModel",
        lambda: {"": torch.randn(2, 3, 32, 32), "timestep": torch.tensor([3, 7])},
        sample_size=32,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **BLOCKS,
    ),
    diffusion(
        "UNet2DConditionModel",
        unet,
        sample_size=32,
        cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
        **BLOCKS,
    ),
    diffusion(
        "AutoencoderKL",
        lambda: images(64, 2),
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **BLOCKS,
    ),
]


@dataclass(frozen=True)
class Peak:
    """Bytes of one step, predicted and measured."""

    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """By how much the prediction is too large, as a part of what was measured."""
        return self.predicted / self.measured - 1


def peaks(architecture: Architecture) -> list[Peak]:
    """Of two steps in a row; the first one makes the state of the optimizer."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the libraries
        model = architecture.make(import_module(architecture.library)).train().to(WHERE)
        optimizer = torch.optim.AdamW(model.parameters())
        given = {
            name: value.to(WHERE) if isinstance(value, torch.Tensor) else value
            for name, value in architecture.inputs().items()
        }
        found = []
        for _ in range(2):
            gc.collect()  # what is dead is not to be counted by one of the two alone
            run = gpumagic.dry_run(step, model, optimizer, given)
            if not run.complete:
                raise RuntimeError(str(run))
            torch.cuda.reset_peak_memory_stats(WHERE)
            step(model, optimizer, given)
            measured = torch.cuda.memory_stats(WHERE)["allocated_bytes.all.peak"]
            found.append(Peak(run.peak[WHERE].peak, measured))
    return found


def row(architecture: Architecture) -> tuple[str, float]:
    """A row of the table, and the larger of the two errors."""
    found = peaks(architecture)
    worst = max((peak.error for peak in found), key=abs)
    sizes = [f"{getattr(p, kind) / 2**20:.1f}" for p in found for kind in ("predicted", "measured")]
    cells = [architecture.name, architecture.library, *sizes, f"{100 * worst:+.2f} %"]
    return f"| {' | '.join(cells)} |", worst


def main() -> int:
    """Compare, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names of models")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.name}")
    asked = parser.parse_args()
    gpumagic.virtual.enable(1, CAPACITY)
    chosen = [a for a in ARCHITECTURES if not asked.only or a.name in asked.only]
    head = [
        "model",
        "library",
        "first step, predicted",
        "measured",
        "second, predicted",
        "measured",
        "error",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    print(*lines, sep="\n")
    worst = 0.0
    for architecture in (a for a in chosen if a.installed):
        line, error = row(architecture)
        print(line, flush=True)
        lines.append(line)
        worst = max(worst, abs(error))
    missing = Counter(a.library for a in chosen if not a.installed)
    for library, count in missing.items():
        print(f"{count} models left out: pip install -c constraints-libraries.txt {library}")
    ran = sorted({a.library for a in chosen if a.installed})
    versions = ", ".join(f"{name} {version(name)}" for name in ["torch", *ran])
    said = f"{len(lines) - 2} models, MiB, {versions}: at most {100 * worst:.2f} % off."
    print(said)
    if asked.write and not missing and not asked.only:
        text = PAGE.read_text()
        PAGE.write_text(TABLE.sub(lambda _: "\n".join([*lines, "", said, ""]), text))
    return int(worst > MOST or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
