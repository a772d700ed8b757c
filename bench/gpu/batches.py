"""The trainer's batches, from their definition in docs/data.md: the same windows in the same order, without the trainer."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E37_79B9_7F4A_7C15
ROUNDS = 8


def mix(value):
    """The finaliser of SplitMix64."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return value ^ (value >> 31)


def sample_at(position, samples, seed):
    """Which of `samples` comes at a position: a Feistel network, walked until its value is a sample."""
    stream = mix((mix(seed) + position // samples) & MASK)
    keys = [mix((stream + turn * GOLDEN) & MASK) for turn in range(1, ROUNDS + 1)]
    half = max(1, ((samples - 1).bit_length() + 1) // 2)
    mask, value = (1 << half) - 1, position % samples
    while True:
        left, right = value >> half, value & mask
        for key in keys:
            left, right = right, left ^ (mix((right + key) & MASK) & mask)
        value = left << half | right
        if value < samples:
            return value


def batch_positions(samples, global_batch, steps):
    """The first position of each step's batch. The end of an epoch that fills no batch is passed over."""
    at = 0
    for _ in range(steps):
        if samples - at % samples < global_batch:
            at += samples - at % samples
        yield at
        at += global_batch


def batches(tokens, seq_len, global_batch, seed, steps):
    """For each step the windows of `seq_len + 1` tokens that it trains on, neighbours in the text sharing one token."""
    samples = (len(tokens) - 1) // seq_len
    if samples < global_batch:
        raise SystemExit(f"{len(tokens)} tokens make {samples} windows of {seq_len} tokens, a batch needs {global_batch}")
    for first in batch_positions(samples, global_batch, steps):
        ids = [sample_at(position, samples, seed) for position in range(first, first + global_batch)]
        yield [tokens[each * seq_len:(each + 1) * seq_len + 1] for each in ids]
