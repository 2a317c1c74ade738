"""Relative positions by gather and scatter, as in model.py, against pad and view: both passes, one core.

    $ PYTHONPATH=. python results/rpe_distances.py
"""
import json
import statistics
import time

import torch
import torch.nn.functional as F


def gathered(q, k, v, k_rel, v_rel, clip):
    T, far = q.size(2), min(q.size(2), clip) - 1
    distance = torch.arange(T) - torch.arange(T)[:, None]
    columns = (distance.clamp(-far, far) + far).expand(*q.shape[:2], T, T)
    k_rel, v_rel = (table[:, clip - 1 - far:clip + far] for table in (k_rel, v_rel))
    weight = (q @ k.mT + (q @ k_rel.mT).gather(-1, columns)).softmax(-1)
    by_distance = weight.new_zeros(*q.shape[:3], 2 * far + 1).scatter_add(-1, columns, weight)
    return weight @ v + by_distance @ v_rel


def skewed(q, k, v, k_rel, v_rel, clip):
    """Tables of 2T rows; row i of the scores starts T - 1 - i columns further right, which a view undoes."""
    T = q.size(2)
    rows = torch.arange(1 - T, T + 1).clamp(1 - clip, clip - 1) + clip - 1
    scores = (q @ k_rel[:, rows].mT).flatten(-2)[..., T - 1:T - 1 + T * (2 * T - 1)]
    weight = (q @ k.mT + scores.unflatten(-1, (T, 2 * T - 1))[..., :T]).softmax(-1)
    by_distance = F.pad(F.pad(weight, (0, T - 1)).flatten(-2), (T - 1, 1)).unflatten(-1, (T, 2 * T))
    return weight @ v + by_distance @ v_rel[:, rows]


torch.set_num_threads(1)
SHAPES = (32, 4, 64, 32, 128), (8, 12, 128, 64, 128), (4, 12, 256, 64, 128), (2, 12, 512, 64, 128)
for B, H, T, K, clip in SHAPES:
    torch.manual_seed(1)
    tensors = [torch.randn(B, H, T, K, requires_grad=True) for _ in range(3)]
    tensors += [torch.randn(H, 2 * clip - 1, K, requires_grad=True) for _ in range(2)]
    assert (gathered(*tensors, clip) - skewed(*tensors, clip)).abs().max() < 1e-3
    seconds = {gathered: [], skewed: []}
    for _ in range(7):
        for function, times in seconds.items():
            start = time.perf_counter()
            function(*tensors, clip).sum().backward()
            times.append(time.perf_counter() - start)
    ratios = [s / g for g, s in zip(seconds[gathered], seconds[skewed], strict=True)]
    print(json.dumps({'batch': B, 'heads': H, 'tokens': T, 'clip_distance': clip,
                      'pad and view over gather': round(statistics.median(ratios), 2)}), flush=True)
