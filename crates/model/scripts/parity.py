"""Loss and gradients of exported models in PyTorch, which shares no code with this crate.

    cargo run -p model --example 02_export_parity -- EXPORTS
    python crates/model/scripts/parity.py EXPORTS                                      # compares every element
    python crates/model/scripts/parity.py EXPORTS --transformers                       # and with that library's models
    python crates/model/scripts/parity.py EXPORTS --golden crates/model/tests/golden   # writes the golden files

Needs torch, numpy and safetensors; `--transformers` that library, too.
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

SAMPLES = 12  # elements of each gradient in a golden file
SAMPLES_BF16 = 40  # where errors are told by their mean square


def gpt2(p, c, tokens):
    """Logits of a GPT-2 over parameters by name; matrices are [in, out]."""
    heads, dim = c["n_head"], c["n_embd"]
    batch, length = tokens.shape

    def norm(x, name):
        return F.layer_norm(x, (dim,), p[f"{name}.weight"], p[f"{name}.bias"], eps=c["layer_norm_epsilon"])

    def linear(x, name):
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def split(x):
        return x.view(batch, length, heads, dim // heads).transpose(1, 2)

    wte = p["transformer.wte.weight"]
    x = F.embedding(tokens, wte) + p["transformer.wpe.weight"][:length]
    for layer in range(c["n_layer"]):
        h = f"transformer.h.{layer}"
        q, k, v = map(split, linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(dim, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).reshape(batch, length, dim), f"{h}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + linear(hidden, f"{h}.mlp.c_proj")
    return F.linear(norm(x, "transformer.ln_f"), p.get("lm_head.weight", wte))


def llama(p, c, tokens):
    """Logits of a Llama over parameters by name; matrices are [out, in]."""
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
    width = dim // heads
    batch, length = tokens.shape
    pairs = torch.arange(width // 2, dtype=torch.float64) * 2 / width
    angles = torch.outer(torch.arange(length, dtype=torch.float64), c["rope_theta"] ** -pairs)
    turn = torch.polar(torch.ones_like(angles), angles)

    def norm(x, name):
        return F.rms_norm(x, (dim,), p[f"{name}.weight"], eps=c["rms_norm_eps"])

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"])

    def split(x, n):
        return x.view(batch, length, n, width).transpose(1, 2)

    def turned(x):
        """Columns i and i + width / 2 of each head as one complex number."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        z = torch.complex(*wide.chunk(2, dim=-1)) * turn.to(torch.promote_types(wide.dtype, torch.complex64))
        return torch.cat([z.real, z.imag], dim=-1).to(x.dtype)

    x = F.embedding(tokens, p["model.embed_tokens.weight"])
    for layer in range(c["num_hidden_layers"]):
        h = f"model.layers.{layer}"
        y = norm(x, f"{h}.input_layernorm")
        q = turned(split(linear(y, f"{h}.self_attn.q_proj"), heads))
        k = turned(split(linear(y, f"{h}.self_attn.k_proj"), kv_heads))
        v = split(linear(y, f"{h}.self_attn.v_proj"), kv_heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(attended.transpose(1, 2).reshape(batch, length, dim), f"{h}.self_attn.o_proj")
        y = norm(x, f"{h}.post_attention_layernorm")
        hidden = F.silu(linear(y, f"{h}.mlp.gate_proj")) * linear(y, f"{h}.mlp.up_proj")
        x = x + linear(hidden, f"{h}.mlp.down_proj")
    table = p.get("lm_head.weight", p["model.embed_tokens.weight"])
    return F.linear(norm(x, "model.norm"), table)


MODELS = {"gpt2": gpt2, "llama": llama}


def mean_loss(scores, case):
    """Mean over all tokens, ignored ones counted as 0."""
    targets = case["targets"].long().flatten()
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores.flatten(0, 1), targets, ignore_index=-1, reduction="sum") / targets.numel()


def run(config, weights, case, dtype):
    p = {n: t.to(dtype).requires_grad_() for n, t in weights.items()}
    loss = mean_loss(MODELS[config["model_type"]](p, config, case["tokens"].long()), case)
    loss.backward()
    return loss.item(), {n: t.grad for n, t in p.items()}


def run_transformers(folder, case):
    """The same with the models of that library. It computes norms and angles in f32 even when asked for f64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    loss = mean_loss(model(input_ids=case["tokens"].long()).logits, case)
    loss.backward()
    return loss.item(), {n: t.grad for n, t in model.named_parameters()}


def as_ours(config, gradients, case):
    """Under our names, transposed where files are, with rows for the whole table."""
    result = {}
    for name, g in gradients.items():
        if config["model_type"] == "gpt2":
            name = name.removeprefix("transformer.")
            name = {"wte.weight": "wte", "wpe.weight": "wpe"}.get(name, name)
            g = g.T if g.dim() == 2 and ".c_" in name else g
        rows = case[f"grad.{name}"].shape[0] - g.shape[0]
        result[name] = F.pad(g, (0, 0, 0, rows)) if rows else g
    return result


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


def golden(config, loss, gradients, narrow):
    """`narrow`: the gradients that PyTorch gets in bf16, for models whose weights are."""
    entries = {}
    for name, gradient in gradients.items():
        flat = gradient.flatten()
        count = min(SAMPLES_BF16 if narrow else SAMPLES, flat.numel())
        largest = int(flat.abs().argmax())
        # A little more than equal steps, so that not all lie in one column.
        at = sorted({(i * flat.numel() // count + 3 * i) % flat.numel() for i in range(count)} | {largest})
        entries[name] = {"max": short(flat[largest].abs()), "at": at, "values": [short(flat[i]) for i in at]}
        if narrow:
            off = (narrow[name].double().flatten() - flat)[at]
            entries[name]["bf16"] = short(off.square().mean().sqrt())
    return {
        "generator": f"crates/model/scripts/parity.py, torch {torch.__version__.split('+')[0]}, float64",
        "model": config,
        "loss": loss,
        "gradients": entries,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", type=pathlib.Path)
    parser.add_argument("--golden", type=pathlib.Path)
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    failed = False
    for folder in sorted(path.parent for path in args.exports.glob("*/case.safetensors")):
        config = json.loads((folder / "config.json").read_text())
        case, weights = load_file(folder / "case.safetensors"), load_file(folder / "model.safetensors")
        loss, gradients = run(config, weights, case, torch.float64)
        want = as_ours(config, gradients, case)
        loss32, single = run(config, weights, case, torch.float32)
        ours = {n: case[f"grad.{n}"] for n in want}
        # Who, loss, gradients, and how many bounds they may be off if that fails the comparison.
        narrow = None
        if any(t.dtype == torch.bfloat16 for t in weights.values()):
            loss16, half = run(config, weights, case, torch.bfloat16)
            narrow = as_ours(config, half, case)
            results = [("ours", case["loss"].item(), ours, None), ("torch bf16", loss16, narrow, None)]
        else:
            single = as_ours(config, single, case)
            results = [("ours", case["loss"].item(), ours, 1.0), ("torch f32", loss32, single, None)]
        if args.transformers:
            theirs_loss, theirs = run_transformers(folder, case)
            results.append(("transformers", theirs_loss, as_ours(config, theirs, case), 1.0))
        for who, got_loss, got, bound in results:
            off, (ratio, name) = abs(got_loss - loss) / loss, worst(got, want)
            print(f"{folder.name}, {who}: loss off by {off:.1e}, gradients at most {ratio:.2f} of the bound ({name})")
            failed |= bound is not None and (off > 2e-6 or ratio > bound)
        if args.golden:
            text = json.dumps(golden(config, loss, want, narrow), separators=(",", ":"))
            (args.golden / f"{folder.name}.json").write_text(text.replace('},"', '},\n"') + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
