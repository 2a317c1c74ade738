"""Steps in float32 and in bfloat16 in turn, of our systems and transformers' BERT: 4 layers, 8 x 128 tokens.

    $ PYTHONPATH=. OMP_NUM_THREADS=1 python results/dtype/measure.py train 30522
    $ PYTHONPATH=. OMP_NUM_THREADS=2 python results/dtype/measure.py finetune 30522

Appends to rows.jsonl: median seconds per step; median, least and largest ratio within a round.
"""
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

import bench
import train

WIDTHS, SYSTEMS = (128, 256, 512, 768), ('original', 'pairwise', 'shatter', 'gau', 'hf_bert')
WARMUP, ROUNDS, ROWS, LENGTH = 2, 7, 8, 128


def time_steps(mode, vocab_size, width):
    """Yield the rows of one width.  mode: a key of bench.MODES"""
    config = {**{key: value for key, value in vars(bench).items() if key.islower()},
              'vocab_size': vocab_size, 'n_embd': width, 'n_head': 4, 'n_inner': 4 * width}
    runtimes = [train.join('cpu', name) for name in ('float32', 'bfloat16')]
    steps = {name: [bench.make_step(name, mode, ROWS, LENGTH, config, runtime) for runtime in runtimes]
             for name in SYSTEMS if mode == 'train' or name not in bench.PEERS}
    seconds = np.zeros((ROUNDS, len(steps), 2))
    for turn in range(WARMUP + ROUNDS):
        for i, pair in enumerate(steps.values()):
            for j, step in enumerate(pair):
                start = time.perf_counter()
                step()
                seconds[max(0, turn - WARMUP), i, j] = time.perf_counter() - start
    ratios = seconds[..., 0] / seconds[..., 1]
    for i, name in enumerate(steps):
        full, half = np.median(seconds[:, i], 0)
        yield {'mode': mode, 'vocab_size': vocab_size, 'width': width, 'threads': torch.get_num_threads(),
               'system': name, 'float32': full, 'bfloat16': half, 'ratio': np.median(ratios[:, i]),
               'least': ratios[:, i].min(), 'most': ratios[:, i].max()}


torch.set_num_threads(int(os.environ.get('OMP_NUM_THREADS', 1)))
with open(Path(__file__).with_name('rows.jsonl'), 'a') as file:
    for size in WIDTHS:
        for row in time_steps(sys.argv[1], int(sys.argv[2]), size):
            print(json.dumps(row))
            file.write(json.dumps(row) + '\n')
