"""One token's kernels over 40 layers of random weights at released widths, for `kernel_bench`.

Owns the weights, the buffers, and the order of the launches. It is a stand-in for the engine's
step: the same kernels over the same bytes, with no checkpoint and no meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from compute.kernels import attention, hyper_connections
from compute.kernels import triton_kernels as k
from compute.kernels.limbs import Limbs

DEVICE = torch.device("cuda")
H, HC, QL, HEADS, HEAD, ROT, INTER, EXPERTS, PICKS = 5120, 4, 1280, 64, 512, 64, 2304, 384, 6
WINDOW, CHOSEN, VOCAB = 128, 512, 129280
BF16, FP32 = torch.bfloat16, torch.float32


def fp8(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random e4m3 codes (no NaN) whose values have an rms near 0.02 after scaling."""
    codes = torch.randint(0, 255, (rows, columns), dtype=torch.uint8, device=DEVICE)
    codes[codes == 0x7F] = 0
    scales = torch.randint(113, 115, (rows // 32, columns // 32), dtype=torch.uint8, device=DEVICE)
    return codes, scales


def fp4(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random e2m1 codes whose values have an rms near 0.02 after scaling."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    return packed, torch.randint(119, 121, (rows, columns // 32), dtype=torch.uint8, device=DEVICE)


def buffer(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


class Layer:
    """One layer's weights; `bytes` is what a token reads of them."""

    def __init__(self) -> None:
        self.qkv = fp8(QL + HEAD, H)
        self.wq_b = fp8(HEADS * HEAD, QL)
        self.wo_a = fp8(8192, 4096)
        self.wo_b = fp8(H, 8192)
        self.shared = (*fp8(INTER, H), *fp8(INTER, H))
        self.shared_down = fp8(H, INTER)
        self.gate = (torch.randn(EXPERTS, H, device=DEVICE) * 0.02).to(BF16)
        self.bias = torch.randn(EXPERTS, device=DEVICE) * 0.1
        self.mix = [torch.randn(24, HC * H, device=DEVICE) * 0.01 for _ in range(2)]
        self.mix_scale = torch.rand(3, device=DEVICE)
        self.mix_base = torch.randn(24, device=DEVICE)
        self.experts = [[*fp4(INTER, H), *fp4(INTER, H), *fp4(H, INTER)] for _ in range(PICKS)]
        self.table = torch.tensor(
            [[t.data_ptr() for t in expert] for expert in self.experts], device=DEVICE
        )
        self.window = torch.randn(WINDOW, HEAD, device=DEVICE).to(BF16)
        held = [*self.qkv, *self.wq_b, *self.wo_a, *self.wo_b, *self.shared, *self.shared_down]
        held += [self.gate, *self.mix, *(t for expert in self.experts for t in expert)]
        self.bytes = sum(t.nbytes for t in held)


class Token:
    """The launches of one token: `layers` layers and the head, all experts resident."""

    def __init__(self, layers: int, tiles: dict[str, dict[str, Any]]) -> None:
        self.tiles = tiles
        self.layers = [Layer() for _ in range(layers)]
        self.head = (torch.randn(VOCAB, H, device=DEVICE) * 0.02).to(BF16)
        self.bytes = sum(layer.bytes for layer in self.layers) + self.head.nbytes
        self.launches = 0
        self.side = torch.cuda.Stream()
        self.b = SimpleNamespace(
            streams=torch.randn(1, HC, H, device=DEVICE).to(BF16),
            collapsed=torch.randn(1, H, device=DEVICE).to(BF16),
            norm=torch.rand(H, device=DEVICE).to(BF16),
            q_norm=torch.rand(QL, device=DEVICE).to(BF16),
            kv_norm=torch.rand(HEAD, device=DEVICE).to(BF16),
            x=buffer(1, H), rounded=buffer(1, H), qkv=buffer(5, 1, QL + HEAD, dtype=FP32),
            cos=torch.rand(1, ROT // 2, device=DEVICE), sin=torch.rand(1, ROT // 2, device=DEVICE),
            slots=torch.tensor([5], dtype=torch.int32, device=DEVICE), latent=buffer(1, QL),
            q=buffer(1, HEADS, HEAD),
            window_index=torch.arange(WINDOW, dtype=torch.int32, device=DEVICE).view(1, -1),
            compressed=torch.randn(4096, HEAD, device=DEVICE).to(BF16),
            chosen=torch.randint(0, 4096, (1, CHOSEN), dtype=torch.int32, device=DEVICE),
            sink=torch.randn(HEADS, device=DEVICE), attended=buffer(1, HEADS, HEAD),
            scratch=attention.AttentionScratch.empty(1, WINDOW + CHOSEN, HEADS, HEAD, DEVICE),
            grouped=buffer(1, 8192), logits=buffer(10, 1, EXPERTS, dtype=FP32),
            ids=buffer(1, PICKS, dtype=torch.int32), weights=buffer(1, PICKS, dtype=FP32),
            shared_a=buffer(1, INTER), shared=buffer(1, H), a=buffer(PICKS, INTER), picks=buffer(1,
            PICKS, H), x_limbs=Limbs.empty(1, H, DEVICE), a_limbs=Limbs.empty(PICKS, INTER, DEVICE),
            sums=buffer(hyper_connections.mix_splits(HC * H), 1, 32, dtype=FP32),
            mixes=[
                [buffer(1, HC, dtype=FP32), buffer(1, HC, dtype=FP32), buffer(1, HC, HC,
                dtype=FP32)] for _ in range(2)
            ],
            out=buffer(1, 1, VOCAB, dtype=FP32),
        )  # fmt: skip

    def mix(self, layer: Layer, which: int) -> None:
        b = self.b
        k.mix_dot(b.streams, layer.mix[which], b.sums)
        k.mix_finish(
            b.sums, layer.mix_scale, layer.mix_base, *b.mixes[which],
            width=HC * H, iterations=20, norm_eps=1e-20, eps=1e-6,
        )  # fmt: skip

    def attend(self) -> None:
        b = self.b
        k.attend(
            b.q, b.cos, b.sin, self.layers[0].window, b.window_index, b.compressed, b.chosen,
            b.sink, b.attended, b.scratch,
        )  # fmt: skip

    def before_attention(self, layer: Layer) -> None:
        b = self.b
        k.normed_fp8_matvec(b.collapsed, b.norm, *layer.qkv, b.qkv, eps=1e-20)
        k.finish_query_kv(
            b.qkv, b.q_norm, b.kv_norm, b.cos, b.sin, b.slots, b.latent, layer.window, eps=1e-20
        )
        k.fp8_matvec(b.latent, *layer.wq_b, b.q.view(1, -1), **self.tiles.get("wq_b", {}))

    def after_attention(self, layer: Layer) -> None:
        b = self.b
        k.fp8_matvec(
            b.attended.view(1, -1),
            *layer.wo_a,
            b.grouped,
            groups=8,
            round_trip=True,
            **self.tiles.get("wo_a", {}),
        )
        pre, post, comb = b.mixes[0]
        k.fp8_matvec_to_streams(
            b.grouped,
            *layer.wo_b,
            b.streams,
            post,
            comb,
            pre,
            b.collapsed,
            **self.tiles.get("wo_b", {}),
        )

    def route(self, layer: Layer) -> None:
        b = self.b
        k.normed_bf16_matvec(
            b.collapsed, b.norm, layer.gate, b.logits, b.rounded, b.x_limbs, eps=1e-20
        )
        k.route(b.logits, layer.bias, b.ids, b.weights, scaling=1.5)

    def shared(self, layer: Layer) -> None:
        b = self.b
        k.fp8_gate_up(
            b.rounded, *layer.shared, b.shared_a, limit=10.0, **self.tiles.get("shared gate+up", {})
        )
        k.fp8_matvec(b.shared_a, *layer.shared_down, b.shared, **self.tiles.get("shared down", {}))

    def routed(self, layer: Layer) -> None:
        b = self.b
        k.experts_gate_up(
            b.x_limbs,
            layer.table,
            b.weights,
            b.a,
            limit=10.0,
            **self.tiles.get("experts gate+up", {}),
        )
        k.quantize(b.a, None, b.a_limbs)
        k.experts_down(b.a_limbs, layer.table, b.picks, **self.tiles.get("experts down", {}))
        pre, post, comb = b.mixes[1]
        k.post(b.picks, b.shared, b.streams, post, comb, pre, b.collapsed)

    def step(self, side: bool) -> None:
        """One token; with `side` what the critical path does not wait for goes on a second
        stream.
        """
        main = torch.cuda.current_stream()

        def beside(*work: Callable[[], None]) -> None:
            if not side:
                for each in work:
                    each()
                return
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                for each in work:
                    each()

        for layer in self.layers:
            beside(lambda layer=layer: self.mix(layer, 0))
            self.before_attention(layer)
            self.attend()
            if side:
                main.wait_stream(self.side)
            self.after_attention(layer)
            self.route(layer)
            beside(lambda layer=layer: self.shared(layer), lambda layer=layer: self.mix(layer, 1))
            if side:
                main.wait_stream(self.side)
            self.routed(layer)
        k.rms_norm(self.b.collapsed, self.b.norm, self.b.x, None, eps=1e-20)
        k.bf16_matvec(self.b.x, self.head, self.b.out, **self.tiles.get("head", {}))
        self.launches = len(self.layers) * 19 + 2

    def parts(self) -> dict[str, Callable[[], None]]:
        """The token's stages by themselves, each over all layers."""

        def over(part: Callable[[Layer], None]) -> Callable[[], None]:
            def body() -> None:
                for layer in self.layers:
                    part(layer)

            return body

        return {
            "before attention": over(self.before_attention),
            "attention": over(lambda _layer: self.attend()),
            "after attention": over(self.after_attention),
            "mixes, twice": over(lambda layer: (self.mix(layer, 0), self.mix(layer, 1))[0]),
            "router": over(self.route),
            "shared expert": over(self.shared),
            "routed experts": over(self.routed),
        }
