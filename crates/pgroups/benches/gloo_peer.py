"""Times collectives over gloo, one measurement for each line on standard input.

    python gloo_peer.py --world 4
    > all_gather 1024 200        operation, bytes of the full f32 tensor, calls
    < 0.00305                    seconds a call, on rank 0
    > end

The first line of output names what is measured. Needs torch.
"""

import argparse
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

OPS = ("all_gather", "reduce_scatter", "all_reduce")


def join(rank, world, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=world)


def measure(op, numel, calls, world):
    full, part = torch.zeros(numel), torch.zeros(numel // world)
    if op == "all_gather":
        call = lambda: dist.all_gather_into_tensor(full, part)
    elif op == "reduce_scatter":
        call = lambda: dist.reduce_scatter_tensor(part, full)
    else:
        call = lambda: dist.all_reduce(full, op=dist.ReduceOp.MAX)
    for _ in range(3):
        call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def serve(rank, world, port):
    """Every rank runs what rank 0 reads; the others wait for it in a broadcast."""
    join(rank, world, port)
    if rank == 0:
        print(f"PyTorch {torch.__version__}, {world} processes", flush=True)
    while True:
        order = torch.zeros(3, dtype=torch.int64)
        if rank == 0:
            words = sys.stdin.readline().split()
            if len(words) == 3 and words[0] in OPS:
                order = torch.tensor([OPS.index(words[0]) + 1, int(words[1]) // 4, int(words[2])])
        dist.broadcast(order, 0)
        op, numel, calls = order.tolist()
        if op == 0:
            break
        seconds = measure(OPS[op - 1], numel, calls, world)
        if rank == 0:
            print(repr(seconds), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=4)
    world = parser.parse_args().world
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Rank 0 stays in this process: a started one has no standard input.
    others = [mp.get_context("spawn").Process(target=serve, args=(rank, world, port)) for rank in range(1, world)]
    for process in others:
        process.start()
    serve(0, world, port)
    for process in others:
        process.join()


if __name__ == "__main__":
    main()
