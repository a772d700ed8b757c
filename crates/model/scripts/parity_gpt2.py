"""Loss and gradients of an exported model in PyTorch, which shares no code with this crate.

    cargo run -p model --example 02_export_parity -- EXPORTS
    python crates/model/scripts/parity_gpt2.py EXPORTS                                      # compares every element
    python crates/model/scripts/parity_gpt2.py EXPORTS --golden crates/model/tests/golden   # writes the golden files

Needs torch, numpy and safetensors.
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors import safe_open

SAMPLES = 12  # elements of each gradient in a golden file


def load(path):
    with safe_open(path, framework="pt") as file:
        sizes = {key: int(value) for key, value in file.metadata().items()}
        return sizes, {name: file.get_tensor(name) for name in file.keys()}


def logits(p, sizes, tokens):
    """A GPT-2 over parameters by name."""
    heads, dim = sizes["heads"], sizes["dim"]
    batch, length = tokens.shape

    def norm(x, name):
        return F.layer_norm(x, (dim,), p[f"{name}.weight"], p[f"{name}.bias"], eps=1e-5)

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def split(x):
        return x.view(batch, length, heads, dim // heads).transpose(1, 2)

    x = F.embedding(tokens, p["wte"]) + p["wpe"][:length]
    for layer in range(sizes["layers"]):
        h = f"h.{layer}"
        q, k, v = map(split, linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(dim, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).reshape(batch, length, dim), f"{h}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + linear(hidden, f"{h}.mlp.c_proj")
    return F.linear(norm(x, "ln_f"), p["wte"][: sizes["vocab"]])


def run(sizes, tensors, dtype):
    """Mean loss over all tokens, ignored ones counted as 0, and its gradient by parameter."""
    weights = {n: t for n, t in tensors.items() if n not in ("tokens", "targets") and not n.startswith("ours.")}
    p = {n: t.to(dtype).requires_grad_() for n, t in weights.items()}
    tokens, targets = tensors["tokens"].long(), tensors["targets"].long()
    scores = logits(p, sizes, tokens).flatten(0, 1)
    loss = F.cross_entropy(scores, targets.flatten(), ignore_index=-1, reduction="sum") / targets.numel()
    loss.backward()
    return loss.item(), {n: t.grad for n, t in p.items()}


def worst(got, want):
    """Largest error over the bound of 2e-6 of a tensor's largest element, at least 2e-7 of the model's; and where."""
    floor = 2e-7 * max(g.abs().max().item() for g in want.values())

    def ratio(n, g):
        return (got[n].double() - g).abs().max().item() / max(2e-6 * g.abs().max().item(), floor)

    ratios = {n: ratio(n, g) for n, g in want.items()}
    name = max(ratios, key=ratios.get)
    return ratios[name], name


def short(value):
    """Ten digits: far more than f32 has."""
    return float(f"{value.item():.10g}")


def golden(sizes, loss, gradients):
    entries = {}
    for name, gradient in gradients.items():
        flat = gradient.flatten()
        count = min(SAMPLES, flat.numel())
        largest = int(flat.abs().argmax())
        # A little more than equal steps, so that not all lie in one column.
        at = sorted({(i * flat.numel() // count + 3 * i) % flat.numel() for i in range(count)} | {largest})
        entries[name] = {"max": short(flat[largest].abs()), "at": at, "values": [short(flat[i]) for i in at]}
    return {
        "generator": f"crates/model/scripts/parity_gpt2.py, torch {torch.__version__.split('+')[0]}, float64",
        "sizes": sizes,
        "loss": loss,
        "gradients": entries,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", type=pathlib.Path)
    parser.add_argument("--golden", type=pathlib.Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    failed = False
    for path in sorted(args.exports.glob("*.safetensors")):
        sizes, tensors = load(path)
        loss, want = run(sizes, tensors, torch.float64)
        loss32, single = run(sizes, tensors, torch.float32)
        ours_loss = tensors["ours.loss"].item()
        ours = {n: tensors[f"ours.grad.{n}"] for n in want}
        for who, got_loss, got in (("ours", ours_loss, ours), ("torch f32", loss32, single)):
            off, (ratio, name) = abs(got_loss - loss) / loss, worst(got, want)
            print(f"{path.stem}, {who}: loss off by {off:.1e}, gradients at most {ratio:.2f} of the bound ({name})")
            failed |= who == "ours" and (off > 2e-6 or ratio > 1.0)
        if args.golden:
            text = json.dumps(golden(sizes, loss, want), separators=(",", ":"))
            (args.golden / f"{path.stem}.json").write_text(text.replace('},"', '},\n"') + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
