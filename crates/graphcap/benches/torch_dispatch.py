"""Small operations on the CPU, one by one: reads how many from each line, answers with nanoseconds for each."""

import sys
import time

import torch


def main():
    torch.set_num_threads(1)
    x, y = torch.ones(64), torch.zeros(64)
    print(f"torch {torch.__version__}", flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            count = int(line)
            if count == 0:
                return
            begin = time.perf_counter_ns()
            for _ in range(count):
                y.add_(x)
            print((time.perf_counter_ns() - begin) / count, flush=True)


main()
