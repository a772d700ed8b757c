"""AdamW of PyTorch on given gradients, as golden numbers.

    python crates/model/scripts/adamw.py > crates/model/tests/golden/adamw.json

Parameters and gradients are functions of step and index, so the file holds results only. Needs torch.
"""

import json

import torch

NUMEL, DECAYED = 24, 15  # elements, and how many of them (the first ones) decay
STEPS, SHOWN = 12, (1, 2, 5, 12)
LR, DECAY, BETAS, EPS = 0.02, 0.1, (0.9, 0.95), 1e-8


def draw(stream, index):
    """In −1..1, exact in f32."""
    bits = (index * 2654435761 + stream * 40503 + 12345) % 2**32
    bits = (bits ^ (bits >> 15)) * 2246822519 % 2**32
    return ((bits >> 9) - 2**22) / 2**22


def gradient(step, index):
    """Of very unequal sizes; some are 0, some in every step."""
    if index == 7 or (index + step) % 5 == 0:
        return 0.0
    return draw(step, index) * 2.0 ** ((index * 7) % 23 - 16)


def run(clip):
    start = torch.tensor([draw(0, i) for i in range(NUMEL)], dtype=torch.float64)
    groups = [start[:DECAYED].clone().requires_grad_(), start[DECAYED:].clone().requires_grad_()]
    optimizer = torch.optim.AdamW(
        [{"params": [groups[0]], "weight_decay": DECAY}, {"params": [groups[1]], "weight_decay": 0.0}],
        lr=LR, betas=BETAS, eps=EPS,
    )
    shown = {}
    for step in range(1, STEPS + 1):
        grads = torch.tensor([gradient(step, i) for i in range(NUMEL)], dtype=torch.float64)
        groups[0].grad, groups[1].grad = grads[:DECAYED].clone(), grads[DECAYED:].clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(groups, clip)
        for group in optimizer.param_groups:
            group["lr"] = LR / step
        optimizer.step()
        if step in SHOWN:
            shown[step] = [float(f"{x:.12g}") for g in groups for x in g.detach().tolist()]
    return shown


if __name__ == "__main__":
    result = {"generator": f"crates/model/scripts/adamw.py, torch {torch.__version__.split('+')[0]}, float64"}
    result |= {"plain": run(None), "clipped": run(0.5)}
    print(json.dumps(result, separators=(",", ":")).replace('],"', '],\n"'))
