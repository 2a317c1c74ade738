"""Time of a training step of every system relative to `original`, interleaved, on one core.

    $ PYTHONPATH=. python results/step_time.py small 20         # a row of SHAPES, rounds
"""
import json
import statistics
import sys
import time

import torch

from model import EncoderConfig, MaskedLM, PermutationLM
from train import make_optimizer

GAU = {'attention': 'gau', 'position': 'rope', 'norm': 'rms', 'bias': False, 'lm_head': 'decoder'}
SYSTEMS = {
    'original': {}, 'no_position': {'position': 'none'}, 'roformer_v1': {'position': 'rope'},
    'roformer_v2': {'position': 'rope', 'norm': 'rms', 'bias': False, 'lm_head': 'decoder'},
    'rpe': {'position': 'rpe'}, 'rab': {'position': 'rab'},
    **{name: {'attention': name, 'position': 'rope'} for name in ('symmetric', 'pairwise', 'shared')},
    **{name: {'attention': name, 'position': 'none'} for name in
       ('part_mask', 'one_head_softmax', 'one_head_sigmoid', 'part_bias', 'shatter')},
    'shatter, recomputed': {'attention': 'shatter', 'position': 'none', 'recompute': True},
    'gau': GAU, **{f'gau_{name}': {**GAU, 'normaliser': name} for name in
                   ('softmax', 'squared_relu', 'scaled_squared_relu')},
    'xlnet_mlm': {'attention': 'xlnet', 'position': 'none'},
    'xlnet': {'attention': 'xlnet', 'position': 'none'},                # its objective is plm
}
SHAPES = {                              # vocab_size, block_size, n_layer, n_head, n_embd, n_inner; batch
    'small': ((4096, 64, 2, 4, 128, 512), 16),
    'middle': ((30522, 128, 4, 4, 256, 1024), 8),
    'long': ((4096, 512, 2, 4, 256, 1024), 4),
}


def make_step(name, settings, shape, batch):
    torch.manual_seed(1)
    config = EncoderConfig(*shape, dropout=0.0, attention_dropout=0.0, **settings)
    if config.attention == 'gau':
        config.n_layer *= 2
    model = (PermutationLM if name == 'xlnet' else MaskedLM)(config)
    optimizer = make_optimizer(model, 1e-4, (0.9, 0.999), 1e-12, 0.01, torch.device('cpu'))
    length, k = config.block_size, -(-15 * config.block_size // 100)
    ids = torch.randint(config.vocab_size, (batch, length))
    positions = torch.rand(batch, length).argsort(1)[:, :k]
    targets = torch.randint(config.vocab_size, (batch, k))
    extra = {'order': torch.rand(batch, length).argsort(1)} if name == 'xlnet' else {}

    def step():
        model(ids, positions, targets, **extra).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


torch.set_num_threads(1)
wanted, rounds = sys.argv[1], int(sys.argv[2])
steps = {name: make_step(name, settings, *SHAPES[wanted]) for name, settings in SYSTEMS.items()}
seconds = {name: [] for name in steps}
for i in range(rounds + 2):
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        if i >= 2:                      # two rounds warm up
            seconds[name].append(time.perf_counter() - start)
for name, times in seconds.items():
    ratios = sorted(t / o for t, o in zip(times, seconds['original'], strict=True))
    quarter = len(ratios) // 4
    print(json.dumps({'shape': wanted, 'system': name, 'ms': round(1000 * statistics.median(times), 2),
                      'ratio': round(statistics.median(ratios), 3),
                      'quartiles': [round(ratios[quarter], 3), round(ratios[-quarter - 1], 3)],
                      'all_ms': [round(1000 * t, 2) for t in times]}))
