"""Trains the benchmark's GPT in PyTorch, so many steps for each line on standard input.

    python torch_peer.py --kind single|compiled|ddp|fsdp --world 1 --text FILE
    > 4                    steps
    < 0.9213 2.8145        seconds a step, on rank 0; loss of the last step

The first line of output names what is measured. The model is that of `main.rs` beside it: learned positions, layer norm, GELU in
its tanh form, tied embedding, f32. Processes share the cores evenly. Needs torch.
"""

import argparse
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

LAYERS, DIM, HEADS, VOCAB, SEQ, BATCH = 6, 384, 6, 256, 256, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        batch, tokens, _ = x.shape
        heads = self.qkv(self.ln_1(x)).view(batch, tokens, 3, HEADS, DIM // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, tokens, DIM))
        return x + self.down(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(DIM)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * LAYERS) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def build(kind):
    """The model as `kind` wraps it, and how its global gradient norm is clipped."""
    torch.manual_seed(1)
    model = Gpt()
    if kind == "compiled":
        return torch.compile(model)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def optimizer(model):
    """Fused where parameters are plain tensors; decay for matrices only."""
    parts = [[p for p in model.parameters() if (p.dim() == 2) == matrix] for matrix in (True, False)]
    groups = [{"params": p, "weight_decay": decay} for p, decay in zip(parts, (0.1, 0.0))]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


class Trainer:
    def __init__(self, kind, rank, world, text):
        self.model = build(kind)
        self.adam = optimizer(self.model)
        self.text, self.share = text, BATCH // world
        self.random = torch.Generator().manual_seed(17 + rank)

    def step(self):
        starts = torch.randint(len(self.text) - SEQ - 1, (self.share,), generator=self.random)
        windows = torch.stack([self.text[start : start + SEQ + 1] for start in starts.tolist()])
        self.adam.zero_grad(set_to_none=True)
        loss = self.model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        return loss.detach()

    def measure(self, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        return (time.perf_counter() - begin) / steps, loss.item()


def serve(rank, args, port):
    """Every rank trains as many steps as rank 0 reads; the others wait for the number in a broadcast."""
    torch.set_num_threads(max(1, os.cpu_count() // args.world))
    if args.world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=args.world)
    with open(args.text, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    trainer = Trainer(args.kind, rank, args.world, text)
    trainer.measure(2)
    if rank == 0:
        threads = torch.get_num_threads()
        print(f"PyTorch {torch.__version__} {args.kind}, {args.world} processes of {threads} threads", flush=True)
    while True:
        order = torch.zeros(1, dtype=torch.int64)
        if rank == 0:
            order[0] = int(sys.stdin.readline().strip() or "0")
        if args.world > 1:
            dist.broadcast(order, 0)
        if order.item() == 0:
            break
        seconds, loss = trainer.measure(order.item())
        if rank == 0:
            print(seconds, loss, flush=True)
    if args.world > 1:
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("single", "compiled", "ddp", "fsdp"), required=True)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--text", required=True)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Rank 0 stays in this process: a started one has no standard input.
    ranks = range(1, args.world)
    others = [mp.get_context("spawn").Process(target=serve, args=(rank, args, port)) for rank in ranks]
    for process in others:
        process.start()
    serve(0, args, port)
    for process in others:
        process.join()


if __name__ == "__main__":
    main()
