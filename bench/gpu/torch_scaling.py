"""Trains GPT-2 in PyTorch on several cards of one host, as DDP or as FSDP2, and prints what a step takes.

    python3 -m torch.distributed.run --standalone --nproc-per-node 8 torch_scaling.py --kind fsdp2 --layers 12 --dim 768 \\
        --heads 12 --batch 32 --tokens 1024
    {"what": "torch 2.11.0 fsdp2 …", "seconds": 0.0581, "first_loss": 10.9, "last_loss": 7.6}

`--batch` is that of one process. Computed in bf16 from f32 parameters (autocast in DDP, FSDP2's own policy), gradients reduced
as f32 and clipped at 1, fused AdamW, attention by cuDNN where it can; compiled, in FSDP2 block by block and with the loss.
`seconds` is the median of windows of steps by the wall clock, of the slowest process. On hosts (`--device cpu`) processes meet
over gloo, in f32 and not compiled.
"""

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from torch_peer import VOCAB, WINDOWS, Gpt, attention, loss_of


class Training:
    def __init__(self, a, rank, device):
        self.on_card, self.device, self.at = device.type == "cuda", device, 0
        torch.manual_seed(1)
        model = Gpt(a.layers, a.dim, a.heads, rows=a.rows, positions=a.tokens).to(device)
        self.model = (ddp if a.kind == "ddp" else fsdp2)(model, device)
        parts = [[p for p in self.model.parameters() if (p.dim() == 2) == matrix] for matrix in (True, False)]
        groups = [{"params": p, "weight_decay": decay} for p, decay in zip(parts, (0.1, 0.0))]
        self.adam = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.autocast = a.kind == "ddp" and self.on_card
        draw = torch.Generator().manual_seed(17 + rank)
        batches = [torch.randint(min(VOCAB, a.rows), (a.batch, a.tokens + 1), generator=draw) for _ in range(8)]
        self.batches = [batch.pin_memory() if self.on_card else batch for batch in batches]

    def step(self):
        batch = self.batches[self.at % len(self.batches)].to(self.device, non_blocking=True)
        self.at += 1
        with torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = self.model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return loss.detach()

    def agreed(self, value, how):
        word = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(word, op=how)
        return word.item()

    def window(self, steps):
        """Seconds a step, of the slowest process."""
        dist.barrier()
        self.settle()
        begin = time.perf_counter()
        for _ in range(steps):
            self.last = self.step()
        self.settle()
        return self.agreed((time.perf_counter() - begin) / steps, dist.ReduceOp.MAX)

    def settle(self):
        if self.on_card:
            torch.cuda.synchronize()


def ddp(model, device):
    ids = [device.index] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return torch.compile(model, dynamic=False) if ids else model


def fsdp2(model, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, policy = init_device_mesh(device.type, (dist.get_world_size(),)), MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model.loss = torch.compile(loss_of, dynamic=False)
        for block in model.blocks:
            block.compile(dynamic=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kind", choices=["ddp", "fsdp2"], required=True)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for name in ("--layers", "--dim", "--heads", "--batch", "--tokens"):
        options.add_argument(name, type=int, required=True)
    options.add_argument("--rows", type=int, default=50304, help="of the embedding; default: %(default)s")
    options.add_argument("--warm-up", type=float, default=3)
    options.add_argument("--seconds", type=float, default=4)
    a = options.parse_args()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if a.device == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        which = attention()
        dist.init_process_group("nccl", device_id=device)
    else:
        device, which = torch.device("cpu"), "attention of the host"
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ["WORLD_SIZE"])))
        dist.init_process_group("gloo")
    training = Training(a, rank, device)
    first_loss = training.step().item()
    training.window(3)
    a_step = training.window(3)
    count = lambda seconds: max(3, round(seconds / a_step))
    training.window(count(a.warm_up))
    seconds = statistics.median(training.window(count(a.seconds / WINDOWS)) for _ in range(WINDOWS))
    if rank == 0:
        how = "compiled" if a.device == "cuda" else "eager, f32"
        print(json.dumps({"what": f"torch {torch.__version__} {a.kind}, {dist.get_world_size()} processes, {how}, {which}",
                          "seconds": seconds, "first_loss": first_loss, "last_loss": training.last.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
