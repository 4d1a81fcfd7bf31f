"""`python -m tools.train.evaluate_checkpoint`: a checkpoint's held-out loss, routes and predictors.

Owns the comparison of the training code with the engine's own forward pass over the exported files,
on the same held-out pieces, and the figures about expert use that the pass gives.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from engram_io.token_map import read_tokenizer
from protocol.config import ModelConfig
from tools.train import tokens
from tools.train.checkpoint import load_masters
from tools.train.engine import Engine, Trace
from tools.train.evaluate import bits_per_byte
from tools.train.expert_use import locality, shares
from tools.train.model import Model
from tools.train.ngrams import ngram_hash
from tools.train.predictors import recalls
from tools.train.tokenizer import bytes_per_id

LENGTH = 512
KEPT_ROUTES = 4096
KEPT_INPUTS = 64


def join(traces: list[Trace]) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks int64 [L, T, k] and MoE inputs bf16 [L, T, H] of all pieces in order."""
    picks = torch.cat([torch.stack(trace.picks) for trace in traces], 1)
    return picks, torch.cat([torch.stack(trace.inputs) for trace in traces], 1)


@click.command(help=__doc__.splitlines()[0])
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--pieces", type=int, default=16, show_default=True, help="Of 512 held-out tokens.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON to write.")
@click.option("--traces", type=click.Path(path_type=Path), help="Keep routes and inputs here.")
def main(
    checkpoint: Path, data: Path, pieces: int, device: str, out: Path, traces: Path | None
) -> None:
    config = ModelConfig.load(checkpoint)
    stream = tokens.load(data / "held_out.tokens.xz")
    cut = torch.from_numpy(tokens.held_out_pieces(stream, LENGTH, config.bos_token_id)[:pieces])
    engine = Engine(checkpoint, torch.device(device))
    done = [engine.run(piece) for piece in cut]
    widths = torch.tensor(bytes_per_id(read_tokenizer(checkpoint / "tokenizer.json")))
    bits = sum(float(losses.double().sum()) for losses, _ in done) / math.log(2)
    of_engine = bits / int(widths[cut[:, 1:]].sum())

    model = Model(config, ngram_hash(checkpoint, config)).to(device)
    load_masters(checkpoint, config, model)
    in_training = bits_per_byte(model, data, LENGTH, pieces)
    picks, inputs = join([trace for _, trace in done])
    gates = [block.ffn.gate for block in model.blocks]
    report = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "tokens": cut[:, 1:].numel(),
        "engine_bits_per_byte": of_engine,
        "training_code": in_training,
        "engine_over_training": of_engine / in_training["bits_per_byte"] - 1,
        "shares": shares(picks, config.n_routed_experts),
        "locality": locality(picks, config.n_routed_experts),
        "predictors": recalls(picks, inputs, gates, config.n_routed_experts),
    }
    out.write_text(json.dumps(report, indent=2) + "\n")
    if traces is not None:
        save_file(
            {
                "tokens": cut[:, :-1].flatten()[:KEPT_ROUTES].to(torch.int32),
                "picks": picks[:, :KEPT_ROUTES].to(torch.uint8).contiguous(),
                "inputs": inputs[:, :KEPT_INPUTS].contiguous(),
            },
            traces,
        )
    click.echo(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
