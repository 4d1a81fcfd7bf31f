"""`python -m tools.train.settle`: balance a trained checkpoint's gates once more, all else fixed.

Owns nothing but the biases: training leaves them balanced for its own mix of sources, and experts
that follow topics need them balanced for the mix they will see. Reads `settle.tokens.xz`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch

from protocol.config import ModelConfig
from protocol.shards import Shards
from protocol.tensor_table import expected_tensors
from tools.train import tokens
from tools.train.checkpoint import load_masters, stored_tensor
from tools.train.evaluate import bits_per_byte
from tools.train.model import Model
from tools.train.ngrams import ngram_hash
from tools.train.writer import write_checkpoint

LENGTH = 512
FIRST_SPEED, LAST_SPEED = 4e-3, 2e-4


@torch.no_grad()
def settle(model: Model, stream: tokens.Tokens, steps: int, sequences: int, length: int) -> None:
    """Move every gate's bias by its load over `steps` batches, ever more slowly."""
    device = model.embed.weight.device
    source = tokens.batches(stream, sequences, length, model.config.bos_token_id, seed=3)
    model.eval()
    for step in range(steps):
        model(torch.from_numpy(next(source)).to(device)[:, :-1])
        left = 1 - step / steps
        for moe in model.moes():
            moe.balance(LAST_SPEED + (FIRST_SPEED - LAST_SPEED) * left)


@click.command(help=__doc__.splitlines()[0])
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Checkpoint to write.")
@click.option("--steps", type=int, default=100, show_default=True)
@click.option("--sequences", type=int, default=32, show_default=True)
@click.option("--length", type=int, default=LENGTH, show_default=True)
@click.option("--device", default="cuda", show_default=True)
def main(
    checkpoint: Path, data: Path, out: Path, steps: int, sequences: int, length: int, device: str
) -> None:
    config = ModelConfig.load(checkpoint)
    model = Model(config, ngram_hash(checkpoint, config))
    load_masters(checkpoint, config, model)
    model = model.to(device)
    settle(model, tokens.load(data / "settle.tokens.xz"), steps, sequences, length)
    shards = Shards.open(checkpoint, config)
    stored = {name: stored_tensor(shards, name) for name in expected_tensors(config)}
    for number, moe in enumerate(model.moes()):
        for name in ("bias", "bias_vl"):
            stored[f"layers.{number}.ffn.gate.{name}"] = moe.gate.bias.cpu()
    top = json.loads((checkpoint / "config.json").read_bytes())
    write_checkpoint(out, top, checkpoint, stored)
    click.echo(json.dumps(bits_per_byte(model, data, length)))


if __name__ == "__main__":
    main()
