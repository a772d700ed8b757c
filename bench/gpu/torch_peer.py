"""Trains GPT-2 in PyTorch on one card, as fast as its users can have it, and prints what a step takes.

    python3 torch_peer.py --layers 12 --dim 768 --heads 12 --batch 8 --tokens 1024 --warm-up 10 --seconds 5
    {"what": "torch 2.11.0 …", "seconds": 0.0181, "memory": 6123…, "first_loss": 10.9, "last_loss": 7.6}

    python3 torch_peer.py --probe            bf16 product of 8192 x 8192, TFLOP/s

bf16 weights and activations, f32 masters and moments, gradients clipped at 1, fused AdamW, attention by cuDNN where it can;
compiled, and the whole step in one CUDA graph (`--mode eager` for neither). `seconds` is the median of windows of steps by
the wall clock, the device idle at the ends of each; `memory` is what the device has used when training is over.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, ROWS, POSITIONS = 50257, 50304, 1024
WINDOWS = 5


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, tokens, dim = x.shape
        parts = self.qkv(self.ln_1(x)).split(dim, dim=2)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


def loss_of(x, weight, targets):
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Gpt(nn.Module):
    def __init__(self, layers, dim, heads, rows=ROWS, positions=POSITIONS):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(rows, dim), nn.Embedding(positions, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln_f, self.loss = nn.LayerNorm(dim), loss_of
        self.register_buffer("places", torch.arange(positions), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(self.places[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.loss(self.ln_f(x), self.wte.weight, targets)


class Update:
    """f32 masters and moments for a model of any type: clipping at 1, AdamW that decays matrices only."""

    def __init__(self, model, rate):
        self.params = list(model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.params]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        decays = [{"params": [m for m in self.masters if (m.dim() == 2) == matrix], "weight_decay": 0.1 * matrix}
                  for matrix in (True, False)]
        on_card = self.params[0].is_cuda
        rate = torch.tensor(rate, device="cuda") if on_card else rate
        self.adam = torch.optim.AdamW(decays, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=True, capturable=on_card)

    def step(self):
        torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
        for p in self.params:
            p.grad = None


class Training:
    def __init__(self, a):
        torch.manual_seed(1)
        with torch.device("cuda"):
            self.model = Gpt(a.layers, a.dim, a.heads).bfloat16()
        self.update = Update(self.model, 3e-4)
        self.forward = torch.compile(self.model, dynamic=False) if a.mode == "graph" else self.model
        draw = lambda: torch.randint(VOCAB, (a.batch, a.tokens + 1)).pin_memory()
        self.batches, self.at = [draw() for _ in range(8)], 0
        self.batch = self.batches[0].cuda()
        self.graph = None
        self.first_loss = self.step().item()
        if a.mode == "graph":
            self.capture()

    def compute(self):
        loss = self.forward(self.batch[:, :-1].contiguous(), self.batch[:, 1:].contiguous())
        loss.backward()
        self.update.step()
        return loss.detach()

    def step(self):
        self.batch.copy_(self.batches[self.at % len(self.batches)], non_blocking=True)
        self.at += 1
        if self.graph is None:
            return self.compute()
        self.graph.replay()
        return self.loss

    def capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.compute()
        self.graph = graph

    def window(self, seconds, a_step):
        """Seconds a step, over about so many of them."""
        steps = max(3, round(seconds / a_step))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.loss = self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps


def attention():
    """cuDNN's where it can be had."""
    for flags in ((False, True), (True, False)):
        torch.backends.cuda.enable_flash_sdp(flags[0])
        torch.backends.cuda.enable_cudnn_sdp(flags[1])
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        try:
            q = torch.randn(2, 12, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
            return "flash attention" if flags[0] else "cuDNN attention"
        except RuntimeError as error:
            print(f"# attention: {error}")
    raise SystemExit("no fused attention runs here")


def probe():
    """The best of short bursts with pauses between them: what the card can before it warms, as llm.c's own was measured."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(12):
        time.sleep(0.3)
        a @ b
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            a @ b
        torch.cuda.synchronize()
        rates.append(5 * 2 * 8192**3 / (time.perf_counter() - begin) / 1e12)
    print(json.dumps({"what": f"torch {torch.__version__}, bf16 product", "tflops": max(rates)}))


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--probe", action="store_true")
    options.add_argument("--mode", choices=["graph", "eager"], default="graph")
    for name in ("--layers", "--dim", "--heads", "--batch", "--tokens"):
        options.add_argument(name, type=int, default=1)
    options.add_argument("--warm-up", type=float, default=10)
    options.add_argument("--seconds", type=float, default=5)
    a = options.parse_args()
    if a.probe:
        return probe()
    which = attention()
    training = Training(a)
    a_step = training.window(0.5, 0.05)
    training.window(a.warm_up, a_step)
    seconds = statistics.median(training.window(a.seconds / WINDOWS, a_step) for _ in range(WINDOWS))
    free, total = torch.cuda.mem_get_info()
    how = "compiled, one graph a step" if a.mode == "graph" else "eager"
    print(json.dumps({"what": f"torch {torch.__version__}, {how}, {which}", "seconds": seconds, "memory": total - free,
                      "first_loss": training.first_loss, "last_loss": training.loss.item()}))


if __name__ == "__main__":
    main()
