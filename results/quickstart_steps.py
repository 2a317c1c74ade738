"""Time of training steps of the quickstart's candidates over that of the old one, in turn.

    $ PYTHONPATH=. OMP_NUM_THREADS=1 python results/quickstart_steps.py 14      # after the quickstart

A step: batch, forward, backward, AdamW. CPU time on one thread, else wall time; median of the rounds' ratios.
"""
import os
import sys
import time

import numpy as np
import torch

import train
from model import EncoderConfig, MaskedLM
from prepare_data import load_meta

OLD = {'rows': 32, 'n_layer': 2, 'n_head': 4, 'n_embd': 128, 'n_inner': 512, 'attention': 'pairwise'}
CASES = {'the old quickstart': {}, 'MLP 512': {'rows': 16}, **{
    ' '.join(f'{key}={value}' for key, value in knobs.items()): {'rows': 16, **knobs} for knobs in (
        {'n_inner': 256}, {'n_inner': 128}, {'n_head': 8}, {'n_head': 2}, {'n_layer': 1, 'n_inner': 1024},
        {'n_embd': 192, 'n_head': 6, 'n_inner': 384}, {'n_inner': 256, 'attention': 'original'},
        {'rows': 8})}}
THREADS, FOLDER = int(os.environ.get('OMP_NUM_THREADS', 1)), 'data/docstrings'
RUNTIME, CLOCK = train.Runtime(torch.device('cpu')), time.process_time if THREADS == 1 else time.perf_counter


def make_step(rows, **shape):
    meta = load_meta(FOLDER)
    loader = train.Loader(train.StreamRows(FOLDER, meta, 'train', 64), train.Masker(meta, 64, 0.15), 1, rows,
                          slice(0, rows))
    model = MaskedLM(EncoderConfig(meta['vocab_size'], 64, position='rope', dropout=0, attention_dropout=0,
                                   **shape))
    optimizer = train.make_optimizer(model, 1e-3, (0.9, 0.999), 1e-12, 0.01, RUNTIME)
    scaler = torch.amp.GradScaler('cpu', enabled=False)

    def step(number):
        start, batch = CLOCK(), loader.batch(number)
        parts = train.micro_batches(batch, rows, RUNTIME.device)
        train.update(model, optimizer, scaler, parts, float(batch['weights'].sum()), 1.0, RUNTIME)
        return CLOCK() - start
    return step


torch.set_num_threads(THREADS)
steps = {name: make_step(**{**OLD, **knobs}) for name, knobs in CASES.items()}
seconds = np.array([[step(number) for step in steps.values()] for number in range(2 + int(sys.argv[1]))])[2:]
for name, ratio in zip(steps, np.median(seconds / seconds[:, :1], 0), strict=True):
    print(f'{name:36} {ratio:.2f}')
