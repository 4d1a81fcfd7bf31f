"""`python -m tools.train.train`: train one model on prepared data.

Owns the loop: batches in a fixed order, one step, a line of JSON every few steps, and at the end
the held-out loss and what is worth keeping (a checkpoint, or the twin's figures alone).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from protocol.config import ModelConfig
from protocol.errors import UsageError
from tools.train import tokens
from tools.train.checkpoint import store
from tools.train.demo_config import parse, without_engram
from tools.train.dense import Dense, active_parameters
from tools.train.draft import Draft, draft_loss
from tools.train.evaluate import bits_per_byte
from tools.train.model import Model, losses
from tools.train.ngrams import ngram_hash
from tools.train.optimizer import optimizers, schedule
from tools.train.writer import write_checkpoint

WARMUP = 60
ANCHORS = 48
DRAFT_EVERY = 2
# Added to the loss times the layers' mean `scatter`, which is at most 1: routing as local as it
# gets may cost the model no more than this many nats a token.
LOCALITY = 0.1
BALANCE_SPEED = 1e-2
LOG_EVERY = 20
TIMED_FROM, SETTLED_AT, WAIT_AT = 40, 140, 300
OVERTIME = 20.0


class Run:
    """One model in training: `step` takes a batch and gives figures worth logging."""

    def __init__(self, kind: str, config: ModelConfig, data: Path, device: torch.device) -> None:
        self.config, self.device = config, device
        self.draft: Draft | None = None
        self.model: Model | Dense
        if kind == "dense":
            self.model = Dense(config).to(device)
        else:
            self.model = Model(config, ngram_hash(data, config)).to(device)
            if kind == "full":
                self.draft = Draft(config).to(device)
        self.parts = [part for part in (self.model, self.draft) if part is not None]
        self.optimizers = optimizers(*self.parts)
        self.random = np.random.default_rng(7)
        self.steps = 0

    def step(self, batch: torch.Tensor, factor: float, balance: float) -> dict[str, torch.Tensor]:
        """One step over int64 [B, S + 1] at `factor` of the full rates and `balance` of the full
        balancing speed; the figures stay on the device."""
        inputs, wanted = batch[:, :-1], batch[:, 1:]
        figures: dict[str, torch.Tensor] = {}
        if isinstance(self.model, Dense):
            hidden = self.model(inputs)
            extra = hidden.new_zeros((), dtype=torch.float32)
        else:
            done = self.model(inputs)
            scattered = [moe.scatter for moe in self.model.moes() if moe.scatter is not None]
            scatter = torch.stack(scattered).mean()
            hidden, extra = done.hidden, done.index_loss + LOCALITY * scatter
            figures["index_loss"] = done.index_loss.detach()
            figures["scatter"] = scatter.detach()
            self.steps += 1
            if self.draft is not None and self.steps % DRAFT_EVERY == 1:
                anchors = self._anchors(inputs.shape[1])
                logits, sure = self.draft(self.model, done, batch, anchors)
                of_draft, right = draft_loss(logits, sure, batch, anchors)
                extra = extra + of_draft
                figures["drafts_right"] = right
        loss = losses(hidden.flatten(0, 1), self.model.head.weight, wanted.flatten()).mean()
        (loss + extra).backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._balance(balance, figures)
        return {"loss": loss.detach(), **figures}

    def _anchors(self, length: int) -> torch.Tensor:
        """Positions of draft blocks that end inside the batch, ascending."""
        last = length - self.config.dspark_block_size - 1
        chosen = np.sort(self.random.choice(last, min(ANCHORS, last), replace=False))
        return torch.from_numpy(chosen).to(self.device)

    def _balance(self, speed: float, figures: dict[str, torch.Tensor]) -> None:
        moes = [
            moe for part in self.parts if isinstance(part, Model | Draft) for moe in part.moes()
        ]
        for moe in moes:
            moe.balance(BALANCE_SPEED * max(speed, 0.03))
        loads = [moe.load for moe in moes if moe.count == self.config.n_routed_experts]
        if loads:
            shares = torch.stack(loads) * self.config.n_routed_experts
            figures["least_share"], figures["most_share"] = shares.min(), shares.max()
            figures["dropped"] = (shares - moes[0].capacity).clamp_min(0).mean()


@dataclass
class Plan:
    """How many steps: told, or settled by one run from its own speed and read by the others.

    `seconds` is when the settling run wants to end, counted from the process' start; it settles on
    no more than `most` steps. Rates do not depend on the number of steps before two fifths of them,
    so it may become known late.
    """

    steps: int | None
    seconds: float | None
    path: Path | None
    most: int
    began: float = field(default_factory=time.perf_counter)
    timed_from: tuple[int, float] | None = None

    def known(self, step: int) -> int | None:
        """The number of steps, None while it is not settled; called before every step."""
        if self.steps is None and self.seconds is not None:
            self._settle(step, self.seconds)
        elif self.steps is None and self.path is not None:
            while not self.path.is_file() and step >= WAIT_AT:
                time.sleep(0.2)
            if self.path.is_file():
                self.steps = int(self.path.read_text())
        return self.steps

    def overdue(self) -> bool:
        """Whether the planned end is so long past that stopping is better than being stopped."""
        if self.seconds is None:
            return False
        return time.perf_counter() - self.began > self.seconds + OVERTIME

    def _settle(self, step: int, seconds: float) -> None:
        if step == TIMED_FROM:
            torch.cuda.synchronize()
            self.timed_from = (step, time.perf_counter())
        if step == SETTLED_AT and self.timed_from is not None:
            torch.cuda.synchronize()
            now = time.perf_counter()
            each = (now - self.timed_from[1]) / (step - self.timed_from[0])
            self.steps = min(self.most, step + int((seconds - (now - self.began)) / each))
            if self.path is not None:
                partial = self.path.with_suffix(".partial")
                partial.write_text(str(self.steps))
                partial.replace(self.path)


def train(
    run: Run, stream: tokens.Tokens, log: Path, plan: Plan, sequences: int, length: int, seed: int
) -> dict[str, Any]:
    """Run all steps; gives tokens, seconds, and writes a line of JSON to `log` now and then.

    Ends early, with what it has learnt so far, OVERTIME seconds after the planned end.
    """
    source = tokens.batches(stream, sequences, length, run.config.bos_token_id, seed)
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as out:
        for step in count():
            steps = plan.known(step)
            if step == steps or plan.overdue():
                break
            batch = torch.from_numpy(next(source)).to(run.device, non_blocking=True)
            figures = run.step(batch, schedule(step, steps, WARMUP), schedule(step, steps, 1))
            if step % LOG_EVERY == 0 or step + 1 == steps:
                line: dict[str, Any] = {"step": step, "tokens": (step + 1) * sequences * length}
                line.update({name: _rounded(value) for name, value in figures.items()})
                line["seconds"] = round(time.perf_counter() - start, 2)
                out.write(json.dumps(line) + "\n")
                out.flush()
    return {
        "steps": step,
        "tokens": step * sequences * length,
        "epochs": step * sequences * length / len(stream),
        "seconds": time.perf_counter() - start,
    }


def _rounded(value: torch.Tensor) -> Any:
    return json.loads(json.dumps(value.tolist()), parse_float=lambda text: round(float(text), 5))


@click.command(help=__doc__.splitlines()[0])
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--model", "kind", type=click.Choice(["full", "no-engram", "dense"]), default="full")
@click.option("--steps", type=int, help="How many; or give --plan.")
@click.option("--seconds", type=float, help="End about then, and write the steps to --plan.")
@click.option("--plan", type=click.Path(path_type=Path), help="Read the steps from here.")
@click.option("--epochs", default=1.0, show_default=True, help="At most so often all text.")
@click.option("--sequences", type=int, default=64, show_default=True, help="Sequences a step.")
@click.option("--length", type=int, default=512, show_default=True, help="Tokens a sequence.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--device", default="cuda", show_default=True)
def main(
    data: Path,
    out: Path,
    kind: str,
    steps: int | None,
    seconds: float | None,
    plan: Path | None,
    epochs: float,
    sequences: int,
    length: int,
    seed: int,
    device: str,
) -> None:
    if steps is None and plan is None:
        raise UsageError("give --steps or --plan")
    torch._dynamo.config.recompile_limit = 32
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    top = json.loads((data / "config.json").read_bytes())
    if kind == "no-engram":
        top = without_engram(top)
    config = parse(top)
    run = Run(kind, config, data, torch.device(device))
    out.mkdir(parents=True, exist_ok=True)
    stream = tokens.load(data / "train.tokens.xz")
    wanted = Plan(steps, seconds, plan, int(epochs * len(stream) / (sequences * length)))
    result = train(run, stream, out / f"{kind}.log.jsonl", wanted, sequences, length, seed)
    if kind == "full":
        checkpoint = out / "checkpoint"
        write_checkpoint(checkpoint, top, data, store(config, *run.parts))
    result.update(
        model=kind,
        sequences=sequences,
        length=length,
        parameters=sum(p.numel() for part in run.parts for p in part.parameters()),
        active_parameters=active_parameters(config),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if device == "cuda" else device,
        held_out=bits_per_byte(run.model, data, length),
    )
    (out / f"{kind}.result.json").write_text(json.dumps(result, indent=2) + "\n")
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
