"""Microseconds to draw a token from a vocabulary of the released size, by what a request asks for.

    python -m tools.sampling_time [--device cuda]

Logits are random: most of the weight on some sixty tokens, the rest on a long tail.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from compute.sampling import Sampler, SamplingParams

VOCABULARY = 129_280
REPEATS = 100
REQUESTS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(top_k=50, top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(top_p=0.95, logprobs=5),
    SamplingParams(frequency_penalty=0.5),
)


def random_logits(device: str) -> torch.Tensor:
    logits = torch.randn(VOCABULARY) * 1.5
    logits[torch.randint(0, VOCABULARY, (60,))] += 12
    return logits.to(device)


def microseconds(params: SamplingParams, device: str) -> float:
    """The median of `REPEATS` draws, of as many vectors of logits."""
    sampler, taken = Sampler(params), []
    for _ in range(REPEATS):
        logits = random_logits(device)
        if logits.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        sampler.sample(logits)
        taken.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    for params in REQUESTS:
        print(f"{microseconds(params, device):8.0f} us  {params}")


if __name__ == "__main__":
    main()
