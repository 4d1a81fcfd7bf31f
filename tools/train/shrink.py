"""`python -m tools.train.shrink`: take back the engram's trust in what only repeated text taught
it.

Owns one step after training: a factor on the engram value of each engram layer and n-gram length,
chosen by coordinate search on the first half of the held-out text (figures are reported on the
second). Text seen several times teaches the tables n-grams that new text does not repeat.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from protocol.config import ModelConfig
from tools.train import tokens
from tools.train.checkpoint import load_masters, store
from tools.train.draft import Draft
from tools.train.evaluate import mean_loss
from tools.train.model import Model
from tools.train.ngrams import ngram_hash
from tools.train.writer import write_checkpoint

LENGTH = 512
FACTORS = (0.8, 0.6, 0.4, 0.2, 0.0)


class Shrinking:
    """A model whose engram values carry factors [layers, lengths]; `apply` sets its masters."""

    def __init__(self, model: Model) -> None:
        self.model, self.config = model, model.config
        layers = self.config.engram_layer_ids
        self.weights = [model.layers[layer].engram.wkv.weight for layer in layers]
        self.originals = [weight.detach().clone() for weight in self.weights]
        self.factors = np.ones((len(layers), self.config.engram_max_ngram_size - 1))

    @torch.no_grad()
    def apply(self) -> None:
        """Scale the value rows of each projection by its columns' n-gram length."""
        c = self.config
        values = slice(c.hc_mult * c.hidden_size, None)
        for weight, original, factors in zip(
            self.weights, self.originals, self.factors, strict=True
        ):
            columns = np.repeat(factors, c.engram_n_heads * c.engram_head_dim)
            scale = torch.from_numpy(columns).to(weight)
            weight[values] = original[values] * scale

    def search(self, pieces: np.ndarray[Any, Any]) -> float:
        """Set each factor in turn to the best of 1 and FACTORS; gives the loss reached."""
        self.apply()
        best = mean_loss(self.model, pieces)
        for place in np.ndindex(self.factors.shape):
            for factor in FACTORS:
                before = self.factors[place]
                self.factors[place] = factor
                self.apply()
                loss = mean_loss(self.model, pieces)
                if loss >= best:
                    self.factors[place] = before
                    break
                best = loss
        self.apply()
        return best


@click.command(help=__doc__.splitlines()[0])
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--pieces", type=int, default=64, show_default=True, help="Tuned on so many.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Checkpoint to write.")
def main(checkpoint: Path, data: Path, pieces: int, device: str, out: Path) -> None:
    config = ModelConfig.load(checkpoint)
    model = Model(config, ngram_hash(checkpoint, config)).to(device)
    draft = Draft(config).to(device)
    load_masters(checkpoint, config, model, draft)
    stream = tokens.load(data / "held_out.tokens.xz")
    cut = tokens.held_out_pieces(stream, LENGTH, config.bos_token_id)
    first, second = cut[: len(cut) // 2], cut[len(cut) // 2 :]
    before = mean_loss(model, second)
    shrinking = Shrinking(model)
    shrinking.search(first[:: max(1, len(first) // pieces)])
    after = mean_loss(model, second)
    top = json.loads((checkpoint / "config.json").read_bytes())
    write_checkpoint(out, top, checkpoint, store(config, model, draft))
    report = {
        "factors": shrinking.factors.tolist(),
        "nats_per_token_second_half": {"before": before, "after": after},
    }
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
