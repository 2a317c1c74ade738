"""How much weight each head gives to the tokens after and before, from [MASK] and from visible tokens

    $ python results/sides.py out/symmetric out/phase        prints a line of sides.jsonl for each head

Runs are those of train.py; the rows are the first 512 for validation, with 15 % of the tokens as [MASK].
"""
import json
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import curves
import train


def sides(folder):
    """Yield a row for each head of a run: means over the [MASK], and over the visible tokens, of all rows."""
    model, tokenizer, content = train.load(folder)
    ids = curves.validation_ids(folder, content, 512)                               # (n, T)
    masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    ids[masked] = tokenizer.special_ids['mask']
    inner = masked[:, 1:-1]                             # the first and the last token have one neighbour
    parts = [curves.scores_of(model, part) for part in ids.split(64)]
    for layer, of_parts in enumerate(zip(*parts, strict=True)):
        weights = torch.cat([scores for _, scores in of_parts]).softmax(-1)         # (n, H, T, T)
        after = weights.diagonal(1, -2, -1)[:, :, 1:]                               # (n, H, T - 2)
        before = weights.diagonal(-1, -2, -1)[:, :, :-1]
        for head in range(weights.size(1)):
            row = {'run': os.path.basename(folder), 'layer': layer, 'head': head}
            for name, tokens in ('mask', inner), ('visible', ~inner):
                row[f'{name}_after'] = round(after[:, head][tokens].mean().item(), 3)
                row[f'{name}_before'] = round(before[:, head][tokens].mean().item(), 3)
            yield row


for path in sys.argv[1:]:
    for line in sides(path):
        print(json.dumps(line))
