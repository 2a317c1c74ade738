"""What a run of train.py costs: parameters, tokens, operations, hours on a GPU.

    $ python results/costs.py                           of each config file with a command of train.py
    $ python results/costs.py config/base.py --attention=shatter --position=none

Operations are those of all matrix products, forward and backward, as PyTorch counts them in a model without
memory. GPU hours are at 4e14 operations a second, 40 % of the bfloat16 peak of an H100 or H200, which
results/bench.md measures for BERT-base on an H200; a small model is slower.
"""
import math
import os
import re
import shlex
import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import prepare_data
import train
from configurator import ROOT, configure, run
from model import MODEL, count_parameters, model_config

BERT_WORDS = 30522              # of --tokenizer=wordpiece
SPEED = 4e14                    # operations a second
ROWS = 4                        # that are counted


def header_arguments(path):
    """Arguments of the first command of train.py in the header of a config file; None if there is none."""
    text = path.read_text(encoding='utf-8').replace('\\\n#', '')
    found = re.search(r'^# \$ .*train\.py (.*)', text, re.M)
    return shlex.split(found[1]) if found else None


def vocabulary(dataset):
    """Size of the vocabulary of a corpus of config/data."""
    path = f'config/data/{dataset}.py'
    knobs = configure(dict(vars(prepare_data)), prepare_data.MINIMUM, [path])
    return BERT_WORDS if knobs['tokenizer'] == 'wordpiece' else knobs['vocab_size']


def cost(arguments):
    """What a run of train.py with these arguments costs, as the headers in config have it."""
    knobs = configure(dict(vars(train)), train.MINIMUM, arguments)
    length = knobs['block_size']
    n_predicted = math.ceil(knobs['mask_fraction'] * length - 1e-9)
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        model = MODEL[knobs['objective']](model_config(knobs, vocabulary(knobs['dataset'])))
        ids = torch.zeros(ROWS, length, dtype=torch.long)
        positions = torch.zeros(ROWS, n_predicted, dtype=torch.long)
        model(ids, positions, positions).sum().backward()
    of_token = counter.get_total_flops() / (ROWS * length)
    tokens = knobs['max_iters'] * knobs['total_batch'] * length
    hours = of_token * tokens / SPEED / 3600
    text = f'{count_parameters(model):,} parameters, {tokens / 1e6:,.0f} million tokens'
    return f'{text} of {of_token / 1e9:.3g} GFLOP' + (f', {hours:,.1f} GPU hours' if hours >= 1 else '')


def main():
    given = sys.argv[1:]
    if given and given[0] in ('--help', '-h'):
        sys.exit(__doc__)
    runs = [given] if given else map(header_arguments, sorted(Path(ROOT, 'config').rglob('*.py')))
    for arguments in filter(None, runs):
        print(f"{' '.join(arguments)}: {cost(arguments)}", flush=True)


if __name__ == '__main__':
    run(main)
